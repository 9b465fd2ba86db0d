"""Predicted latencies: the header, the record, the metrics, and which requests are learned from."""

import asyncio
from dataclasses import replace
from math import nan
from typing import Any

import msgspec
import pytest

from tandem_services.common.errors import ApiError
from tandem_services.common.metrics import MetricFamilies, new_registry
from tandem_services.gateway.console.latency_rows import latency_rows
from tandem_services.gateway.objectives import Objectives, SloFields, SloMode, objectives_of
from tandem_services.gateway.observe.explain import AttemptRecord, ChoiceRecord, RequestJournal, RequestRecord
from tandem_services.gateway.observe.predictions import LEARNED_PER_SECOND, Predictions, judged
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.router.calibration import MAX_HANDLING_S, MIN_SAMPLES, Calibration
from tandem_services.router.decision import Latency, Placement, ScoreTerm
from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.metric_text import metric_sum
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

HEADER = "x-tandem-predicted-ttft-ms"
LATENCY = Latency(
    terms=(ScoreTerm("prefill_queue", 0.1), ScoreTerm("prefill_compute", 0.15)),
    itl_s=0.01,
    kind="hash/cpu/tp1",
    decode_kind="hash/cpu/tp1",
)


def predictions(clock: ServiceClock | None = None) -> Predictions:
    return Predictions(MetricFamilies(new_registry()), model="mock", clock=clock or ServiceClock())


def record_of(known: Predictions, *, attempts: int = 1, choices: int = 1, **changes: Any) -> RequestRecord:
    """A request that took 0.2 s in queues, 0.3 s to compute and 0.02 s between tokens."""
    choice = ChoiceRecord(index=0, ttft_s=0.5, queue_s=0.15, admission_s=0.05, prefill_s=0.3, itl_s=0.02)
    choice.finish_reason, choice.output_tokens = "length", 9
    for _ in range(attempts):
        made = replace(make_choice("r", make_view("w")), placement=Placement.PAIR, latency=LATENCY)
        predicted = known.predict(made, gateway_wait_s=0.0)
        attempt = choice.begin_attempt(made, predicted=predicted, resumed_tokens=0, began_s=0.0)
        attempt.outcome = "finished"
    fields: dict[str, Any] = {
        "request_id": "r",
        "client_request_id": None,
        "endpoint": "/v1/completions",
        "model": "mock",
        "requested_model": "mock",
        "stream": False,
        "prompt_tokens": 10,
        "n": choices,
        "created": 0,
        "choices": [choice] * choices,
        "status": 200,
    }
    return RequestRecord(**fields | changes)


def test_measured_requests_correct_later_predictions():
    known = predictions()
    for _ in range(MIN_SAMPLES):
        known.finished(record_of(known))
    [attempt] = record_of(known).choices[0].attempts
    assert attempt.predicted is not None
    assert attempt.predicted.ttft_s == pytest.approx(0.5)
    assert attempt.predicted.itl_s == pytest.approx(0.02)


def test_learning_is_bounded_whenever_requests_came():
    clock = ServiceClock()
    known = predictions(clock)
    for number in range(3 * LEARNED_PER_SECOND):
        known.finished(record_of(known, created=number % 7))
    [factors] = known.calibration.factors()
    assert factors.samples == LEARNED_PER_SECOND
    clock.advance(1.0)
    known.finished(record_of(known))
    [factors] = known.calibration.factors()
    assert factors.samples == LEARNED_PER_SECOND + 1


def test_slow_uploads_lengthen_predictions_by_a_second_at_most():
    known = predictions()
    for _ in range(MIN_SAMPLES):
        record = record_of(known)
        record.choices[0].ttft_s = 60.0
        known.finished(record)
    [factors] = known.calibration.factors()
    assert factors.handling_s == MAX_HANDLING_S


async def test_figures_that_are_no_durations_end_no_request(gateway):
    gateway.chooser.latency = msgspec.structs.replace(LATENCY, terms=(ScoreTerm("prefill_compute", nan),))
    response = await gateway.chat(max_tokens=3)
    assert response.status_code == 200
    assert HEADER not in response.headers
    text = (await gateway.http.get("/metrics")).text
    assert metric_sum(text, "tandem_gateway_prediction_errors_total") == 1


async def test_failing_calibration_ends_no_request(gateway, monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    gateway.chooser.latency = LATENCY
    monkeypatch.setattr(Calibration, "learn", fail)
    answer = await gateway.chat(max_tokens=3)
    assert answer.status_code == 200
    assert (await gateway.http.get(f"/v1/requests/{answer.json()['id']}/explain")).json()["status"] == 200
    text = (await gateway.http.get("/metrics")).text
    assert metric_sum(text, "tandem_gateway_prediction_errors_total") == 1
    assert metric_sum(text, "tandem_gateway_num_requests_running") == 0


def canceled(record: RequestRecord) -> None:
    record.status = 499


def failed(record: RequestRecord) -> None:
    record.status, record.error = 500, "no worker"


def failed_in_its_stream(record: RequestRecord) -> None:
    record.error = "worker lost"


def moved(record: RequestRecord) -> None:
    record.choices[0].attempts[0].outcome = "moved"


def unfinished(record: RequestRecord) -> None:
    record.choices[0].finish_reason = None


def unpredicted(record: RequestRecord) -> None:
    record.choices[0].attempts[0].predicted = None


def waited_for_a_start(record: RequestRecord) -> None:
    record.choices[0].lacked_workers = True


@pytest.mark.parametrize(
    "change", [canceled, failed, failed_in_its_stream, moved, unfinished, unpredicted, waited_for_a_start]
)
def test_other_requests_are_not_learned_from(change):
    known = predictions()
    for _ in range(MIN_SAMPLES - 1):
        known.finished(record_of(known))
    before = known.calibration.factors()
    record = record_of(known)
    change(record)
    known.finished(record)
    assert judged(record) is None
    assert known.calibration.factors() == before
    known.finished(record_of(known))
    assert known.calibration.factors() != before


@pytest.mark.parametrize("shape", [{"attempts": 2}, {"choices": 2}, {"attempts": 0}])
def test_calibration_ignores_retries_and_multiple_choices(shape):  # [one-attempt-learned]
    known = predictions()
    known.finished(record_of(known))
    before = known.calibration.factors()
    known.finished(record_of(known, **shape))
    assert known.calibration.factors() == before


def test_record_survives_the_journal_with_its_prediction():
    known, journal = predictions(), RequestJournal(4)
    record = record_of(known)
    journal.open(record)
    journal.close(record)
    found = journal.find("r")
    assert found is not None
    assert isinstance(found.choices[0].attempts[0], AttemptRecord)
    assert found.choices[0].attempts[0].predicted == record.choices[0].attempts[0].predicted


async def test_response_has_the_predicted_time_to_its_first_token(gateway):
    assert HEADER not in (await gateway.chat(max_tokens=3)).headers
    gateway.chooser.latency = LATENCY
    whole = await gateway.chat(max_tokens=3)
    assert whole.headers[HEADER] == "250"
    streamed = await gateway.chat(max_tokens=3, stream=True)
    assert streamed.headers[HEADER] == "250"
    answer_id = events(streamed)[0]["id"]
    record = (await gateway.http.get(f"/v1/requests/{answer_id}/explain")).json()
    [attempt] = record["choices"][0]["attempts"]
    assert attempt["predicted"]["ttft_s"] == 0.25
    assert {term["name"] for term in attempt["predicted"]["terms"]} >= {"gateway_wait", "prefill_queue"}


async def test_predictions_are_metrics(gateway):
    gateway.chooser.latency = LATENCY
    for _ in range(2):
        assert (await gateway.chat(max_tokens=3)).status_code == 200
    text = (await gateway.http.get("/metrics")).text
    assert metric_sum(text, "tandem_gateway_ttft_prediction_ratio_count") == 2
    assert metric_sum(text, "tandem_gateway_itl_prediction_ratio_count") == 2
    assert metric_sum(text, "tandem_gateway_latency_calibrated") == 1
    assert 'tandem_gateway_latency_factor{factor="compute",kind="hash/cpu/tp1"' in text


async def test_errors_have_no_prediction(gateway):
    gateway.chooser.latency = LATENCY
    gateway.chooser.fleet.clear()
    response = await gateway.chat(max_tokens=3)
    assert response.status_code == 503
    assert HEADER not in response.headers


class OneModel:
    """What the console reads of a model service."""

    def __init__(self, known: Predictions) -> None:
        self.predictions = known
        self.model = type("Model", (), {"name": "mock"})


def test_console_shows_predicted_against_measured():
    known, journal = predictions(), RequestJournal(64)
    for number in range(MIN_SAMPLES):
        record = record_of(known, request_id=f"r{number}")
        journal.open(record)
        known.finished(record)
        journal.close(record)
    service: Any = OneModel(known)
    [row] = latency_rows([service], journal)
    assert (row.model, row.kind, row.placement) == ("mock", "hash/cpu/tp1", "pair")
    assert (row.measured_ttft_s, row.predicted_ttft_s) == (0.5, 0.25)
    assert (row.measured_itl_s, row.predicted_itl_s) == (0.02, 0.01)
    assert (row.queue, row.compute, row.itl) == pytest.approx((2.0, 2.0, 2.0))
    assert row.calibrated


@pytest.mark.parametrize("stream", [False, True])
async def test_objectives_of_headers_and_body_are_counted(gateway, stream):
    headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
    body = {"model": "mock", "prompt": "hi", "max_tokens": 5, "stream": stream, "slo": {"ttft_ms": 0.000001}}
    for fields in ({**body}, {**body, "slo": None}):
        response = await gateway.http.post("/v1/completions", json=fields, headers=headers)
        assert response.status_code == 200
    text = (await gateway.http.get("/metrics")).text

    def counted(objective: str, result: str) -> float:
        labels = f'{{model_name="mock",objective="{objective}",result="{result}"}}'
        lines = [line for line in text.splitlines() if line.startswith(f"tandem_gateway_slo_requests_total{labels}")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    assert (counted("ttft", "good"), counted("ttft", "bad")) == (1, 1)
    assert (counted("itl", "good"), counted("itl", "bad")) == (2, 0)
    assert metric_sum(text, "tandem_gateway_goodput_requests_total") == 1


def test_requests_that_met_all_objectives_are_goodput():
    registry = new_registry()
    known = Predictions(MetricFamilies(registry), model="mock", clock=ServiceClock())
    met, missed = Objectives(ttft_s=0.5, itl_s=0.02), Objectives(ttft_s=0.4)
    for objectives, status in ((met, 200), (missed, 200), (met, 503), (met, 429), (met, 499), (met, 400), (None, 200)):
        known.finished(record_of(known, objectives=objectives, status=status))
    assert registry.get_sample_value("tandem_gateway_goodput_requests_total", {"model_name": "mock"}) == 1
    counts = {
        (objective, result): registry.get_sample_value(
            "tandem_gateway_slo_requests_total", {"model_name": "mock", "objective": objective, "result": result}
        )
        for objective in ("ttft", "itl")
        for result in ("good", "bad")
    }
    assert counts == {("ttft", "good"): 1, ("ttft", "bad"): 3, ("itl", "good"): 1, ("itl", "bad"): 2}


BAD_NUMBERS = ["-1", "0", "nan", "inf", "soon", "", "86400001", "1e400", "1 2"]


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_objective_that_is_no_duration_is_a_400_with_its_name(name, value):
    with pytest.raises(ApiError) as error:
        objectives_of([(name.encode(), value.encode())], None)
    assert (error.value.status, error.value.param) == (400, name)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_header_that_is_given_twice_is_a_400_with_its_name(gateway, path):
    body = {"model": "mock", "prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    wanted = {"/v1/completions": ("prompt",), "/v1/responses": ("input",)}.get(path, ("messages",))
    fields = {name: value for name, value in body.items() if name in ("model", *wanted)} | {"max_tokens": 4}
    if path == "/v1/responses":
        fields["max_output_tokens"] = fields.pop("max_tokens")
    good = await gateway.http.post(path, json=fields, headers=[("x-slo-ttft-ms", "5")])
    assert good.status_code == 200, good.text
    bad = await gateway.http.post(path, json=fields, headers=[("x-slo-ttft-ms", "5")] * 10)
    assert bad.status_code == 400
    assert "x-slo-ttft-ms must be given once" in bad.text


@pytest.mark.parametrize(
    ("slo", "param"),
    [
        ({"ttft_ms": 0}, "slo.ttft_ms"),
        ({"tpot_ms": -5}, "slo.tpot_ms"),
        ({"ttft_ms": "5"}, "slo.ttft_ms"),
        ({"itl_ms": 5}, "slo.itl_ms"),
        ([5], "slo"),
    ],
)
async def test_bad_objective_in_a_body_is_a_400_with_its_path(gateway, slo, param):
    response = await gateway.complete(slo=slo)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_objectives_come_from_body_then_header_then_flags():
    flags = Objectives(ttft_s=9.0, itl_s=8.0)
    headers = [(b"x-slo-ttft-ms", b"7000")]
    assert objectives_of(headers, SloFields(ttft_ms=6000), flags) == Objectives(ttft_s=6.0, itl_s=8.0)
    assert objectives_of(headers, SloFields(), flags) == Objectives(ttft_s=7.0, itl_s=8.0)
    assert objectives_of([], None, flags) == flags
    assert not objectives_of([], None)


@pytest.fixture
async def strict(rack, tokenizer):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines, slo_admission=SloMode.STRICT) as gateway:
        gateway.chooser.latency = LATENCY
        yield gateway


async def test_strict_gateway_rejects_with_a_time_to_retry(strict):
    assert (await strict.complete(max_tokens=3, slo={"ttft_ms": 60000})).status_code == 200
    strict.chooser.room = 0
    response = await strict.complete(max_tokens=3, slo={"ttft_ms": 100})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "slo_unattainable"
    assert int(response.headers["retry-after"]) >= 1
    text = (await strict.http.get("/metrics")).text
    assert strict.chooser.open == 0
    bad = 'tandem_gateway_slo_requests_total{model_name="mock",objective="ttft",result="bad"} 1.0'
    assert bad in text


async def test_request_rejected_for_its_wait_is_demand(strict, monkeypatch):  # [rejected-is-demand]
    """It never arrives in the queue, which counts all others: the planner would see a fleet that has little to do."""

    async def value(name: str) -> float:
        return metric_sum((await strict.http.get("/metrics")).text, f"tandem_gateway_{name}")

    async def is_held() -> bool:
        return await value("num_requests_waiting") == 1

    monkeypatch.setattr(LateBinding, "expected_wait_s", lambda *_, **__: 60.0)
    strict.chooser.room = 0
    first = asyncio.create_task(strict.complete(max_tokens=3))
    await until(is_held, 30.0, "a request waits")
    before = await value("asked_prompt_tokens_total")
    response = await strict.complete(max_tokens=3, slo={"ttft_ms": 100})
    assert response.status_code == 429
    assert await value("asked_prompt_tokens_total") > before
    assert await value("num_requests_waiting") == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
