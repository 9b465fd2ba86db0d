"""Models, tokenizer, explain, health, metrics and logs of a gateway."""

import logging

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_engine.messages.outputs import CacheHits
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.span_export import SpanExport
from tandem_services.common.tracing import TracingConfig
from tandem_services.gateway.models.file import ModelsFileMetrics
from tandem_services.gateway.models.tokenizer_loads import counted_loads
from tandem_services.gateway.observe.cells import watch_cells
from tandem_services.gateway.observe.explain import PredictedFetch, RequestJournal, RequestRecord
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_testing.exported_metrics import gateway_metrics, resumed_record
from tandem_testing.gateway_builders import live_gateway, priced_options_of
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer


@pytest.fixture
async def pair(rack, tokenizer):
    """A prefill and a decode worker behind one gateway."""
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        rack.add(name, MockBehavior(token=hash_tokens(3, 250), eos=EOS), role)
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        yield live


# Models


async def test_model_is_listed_and_found(gateway):
    listing = (await gateway.http.get("/v1/models")).json()
    card = (await gateway.http.get("/v1/models/mock")).json()
    assert listing == {"object": "list", "data": [card]}
    assert (card["id"], card["object"], card["max_model_len"]) == ("mock", "model", 512)


async def test_another_model_is_a_404_that_names_it(gateway):
    answer = await gateway.http.get("/v1/models/some/other")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model 'some/other' does not exist. Available: mock."
    assert answer.json()["error"]["code"] == "model_not_found"


# Tokenizer


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize_are_inverse(gateway, tokenizer, prefix):
    body = {"model": "mock", "prompt": "hello <|im_end|>", "return_token_strs": True}
    answer = (await gateway.http.post(f"{prefix}/tokenize", json=body)).json()
    assert answer["tokens"] == tokenizer.encode("hello <|im_end|>")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    back = await gateway.http.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "hello <|im_end|>"}


async def test_messages_are_tokenized_as_generation_sees_them(gateway, rack):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = (await gateway.http.post("/tokenize", json=body)).json()["tokens"]
    await gateway.chat("hi", max_tokens=1)
    assert tuple(tokens) == rack.engines[0].received[0].input_ids


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": "a", "model": "other"}])
async def test_tokenize_request_must_be_one_thing(gateway, body):
    assert (await gateway.http.post("/tokenize", json=body)).status_code in (400, 404)


@pytest.mark.parametrize("tokens", [[-1], [400], [2**63], ["a"], 5])
async def test_ids_outside_the_vocabulary_have_no_text(gateway, tokens):  # [whole-characters]
    assert (await gateway.http.post("/detokenize", json={"tokens": tokens})).status_code == 400


async def test_partial_characters_are_replaced(gateway, tokenizer):  # [whole-characters]
    half = tokenizer.encode("é")[:1]
    assert (await gateway.http.post("/detokenize", json={"tokens": half})).json() == {"prompt": "\ufffd"}


async def test_model_without_a_chat_template_says_so(rack, tmp_path):  # [template-sandboxed]
    bare = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=None))
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, bare, rack.engines) as gateway:
        answer = await gateway.chat(max_tokens=1)
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert (await gateway.complete(max_tokens=1)).status_code == 200


# Explain


async def test_explain_tells_where_cached_tokens_were(rack, tokenizer):
    hits = CacheHits(host=16, disk=8, fetched=32, unusable=48)
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS, cached_tokens=64, cache_hits=hits))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        answer = (await gateway.complete(max_tokens=1)).json()
        record = (await gateway.http.get(f"/v1/requests/{answer['id']}/explain")).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    [choice] = record["choices"]
    assert choice["cached_tokens"] == 64
    assert choice["cache_hits"] == {"device": 8, "host": 16, "disk": 8, "fetched": 32}
    assert choice["unusable_tokens"] == 48


async def test_explain_without_cache_tiers_reports_cached_tokens_only(gateway):
    answer = (await gateway.complete(max_tokens=1)).json()
    [choice] = (await gateway.http.get(f"/v1/requests/{answer['id']}/explain")).json()["choices"]
    assert (choice["cached_tokens"], choice["cache_hits"]) == (4, None)


async def test_explain_tells_where_a_request_ran_and_what_moved(pair):
    answer = (await pair.complete(max_tokens=9)).json()
    record = (await pair.http.get(f"/v1/requests/{answer['id']}/explain")).json()
    assert (record["status"], record["endpoint"], record["prompt_tokens"]) == (200, "/v1/completions", 2)
    [choice] = record["choices"]
    [attempt] = choice["attempts"]
    assert (attempt["prefill"], attempt["decode"], attempt["outcome"]) == ("p@1", "d@1", "finished")
    assert attempt["source"] == "local"
    assert attempt["terms"] == [{"name": "queue", "seconds": 0.001}, {"name": "prefill", "seconds": 0.002}]
    assert (choice["transfer"]["pages"], choice["transfer"]["bytes"]) == (3, 3 << 14)
    assert choice["output_tokens"] == 9
    assert 0 < choice["ttft_s"] <= record["e2e_s"]
    assert "tcp://" not in msgspec.json.encode(record).decode()


async def test_explain_tells_what_a_choice_was_made_from(pair):
    pair.chooser.priced = priced_options_of("p@1", "d@1", others=2, more=5)
    answer = (await pair.complete(max_tokens=1)).json()
    record = (await pair.http.get(f"/v1/requests/{answer['id']}/explain")).json()
    candidates = record["choices"][0]["attempts"][0]["candidates"]
    assert candidates["more"] == 5
    assert [(each["prefill"], each["decode"]) for each in candidates["options"]] == [
        ("p@1", "d@1"),
        (None, "other-0@1"),
        (None, "other-1@1"),
    ]
    assert candidates["options"][1] == {
        "decode": "other-0@1",
        "prefill": None,
        "predicted_s": 1.5,
        "terms": [{"name": "decode_load", "seconds": 0.5}, {"name": "prefill_compute", "seconds": 1.0}],
        "matched_tokens": 64,
        "matched_host_tokens": 48,
        "decode_matched_tokens": 64,
        "decode_matched_host_tokens": 0,
        "fetch": {"source": "p@1", "tokens": 128, "seconds": 0.25},
    }


async def test_explain_finds_the_clients_own_id(pair):
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    await pair.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    record = (await pair.http.get("/v1/requests/mine/explain")).json()
    assert record["client_request_id"] == "mine"


async def test_unknown_request_cannot_be_explained(pair):
    assert (await pair.http.get("/v1/requests/nobody/explain")).status_code == 404


def test_journal_forgets_the_oldest_with_its_alias():
    journal = RequestJournal(2)
    for number in range(4):
        journal.open(record(f"id{number}", client="same" if number < 2 else None))
    assert journal.find("id1") is None
    assert journal.find("same") is None
    assert journal.find("chatcmpl-id3") is not None


def test_newest_of_equal_client_ids_is_explained():
    journal = RequestJournal(2)
    for number in range(3):
        journal.open(record(f"id{number}", client="same"))
    found = journal.find("same")
    assert found is not None
    assert found.request_id == "id2"


def record(request_id: str, *, client: str | None) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        client_request_id=client,
        endpoint="/v1/completions",
        model="mock",
        requested_model="mock",
        stream=False,
        prompt_tokens=1,
        n=1,
        created=0,
        choices=[],
    )


async def test_finished_request_is_one_log_line_with_the_same_facts(pair, caplog):
    caplog.set_level(logging.INFO)
    answer = await pair.complete("secret prompt", max_tokens=3)
    [line] = [r for r in caplog.records if r.message == "request finished"]
    assert line.fields["request_id"] == answer.headers["x-request-id"]
    assert (line.fields["prefill"], line.fields["decode"]) == (["p@1"], ["d@1"])
    assert (line.fields["status"], line.fields["output_tokens"], line.fields["pages_moved"]) == (200, 3, 3)
    assert "secret" not in str(line.fields)


# Operations


async def test_liveness_depends_on_nothing_and_readiness_on_workers(gateway):
    assert (await gateway.http.get("/ready")).json() == {"status": "ok", "reasons": []}
    gateway.chooser.fleet.clear()
    for path in ("/ready", "/health"):
        answer = await gateway.http.get(path)
        assert answer.status_code == 503
        assert answer.json() == {"status": "unavailable", "reasons": ["workers: no worker is registered"]}
    assert (await gateway.http.get("/live")).status_code == 200
    assert (await gateway.http.get("/version")).json()["version"]


async def test_metrics_count_requests_tokens_and_attempts(pair):
    await pair.complete(max_tokens=4)
    await pair.chat(model="unheard-of")
    text = (await pair.http.get("/metrics")).text
    for line in (
        'tandem_gateway_requests_total{code="200",endpoint="/v1/completions",model_name="mock"} 1.0',
        'tandem_gateway_requests_total{code="404",endpoint="/v1/chat/completions",model_name=""} 1.0',
        'tandem_gateway_attempts_total{model_name="mock",outcome="finished"} 1.0',
        'tandem_gateway_generation_tokens_total{model_name="mock"} 4.0',
        'tandem_gateway_prompt_tokens_total{model_name="mock"} 2.0',
        'tandem_gateway_time_to_first_token_seconds_count{model_name="mock"} 1.0',
        'tandem_gateway_transferred_pages_total{model_name="mock"} 3.0',
        'tandem_gateway_kv_transfer_seconds_count{model_name="mock"} 1.0',
        'tandem_gateway_kv_transfer_exposed_seconds_count{model_name="mock"} 1.0',
        'tandem_gateway_route_decisions_total{model_name="mock",reason="prefix",source="local"} 1.0',
    ):
        assert line in text
    assert "unheard-of" not in text


def test_resumption_is_counted_by_how_the_attempt_before_ended():
    registry = CollectorRegistry()
    GatewayMetrics(MetricFamilies(registry), model="m").finished(resumed_record())
    assert (
        registry.get_sample_value("tandem_gateway_resumptions_total", {"model_name": "m", "cause": "worker_lost"}) == 1
    )
    assert registry.get_sample_value("tandem_gateway_kv_transfer_seconds_sum", {"model_name": "m"}) == 0.004
    assert registry.get_sample_value("tandem_gateway_kv_transfer_exposed_seconds_sum", {"model_name": "m"}) == 0.0004


FETCH = PredictedFetch(source="w@1", tokens=32, seconds=0.01)


@pytest.mark.parametrize(
    ("reason", "source", "fetch", "matched_tokens"),
    [
        ("session", "session", None, 32),
        ("fetch", "redis", FETCH, 8),
        ("prefix", "local", None, 8),
        ("load", "redis", None, 0),
    ],
)
def test_route_decision_is_counted_by_what_spoke_for_the_workers(reason, source, fetch, matched_tokens):
    done = resumed_record()
    [choice] = done.choices
    attempt = msgspec.structs.replace(choice.attempts[0], source=source, fetch=fetch, matched_tokens=matched_tokens)
    choice.attempts = [attempt]
    registry = CollectorRegistry()
    GatewayMetrics(MetricFamilies(registry), model="m").finished(done)
    labels = {"model_name": "m", "source": source, "reason": reason}
    assert registry.get_sample_value("tandem_gateway_route_decisions_total", labels) == 1


async def test_gateway_serves_all_metrics_checked_for_conventions(rack, tokenizer, tmp_path):
    keys = write_keys(tmp_path, root={"admin": True})
    spans = SpanExport(TracingConfig(endpoint="http://127.0.0.1:1"), service="g", instance="g1")
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans, api_keys=keys) as gateway:
        text = (await gateway.http.get("/metrics", headers=bearer("root"))).text
    spans.close()
    served = {family.name for family in text_string_to_metric_families(text)}
    checked = {family.name for family in gateway_metrics()}
    ours = {name for name in served if name.startswith("tandem_") and not name.endswith("_created")}
    assert ours | names_of_some_gateways() == checked


def names_of_some_gateways() -> set[str]:
    """Of metrics that a gateway has only when it has other cells, or its models come from a file, or their tokenizers
    from workers."""
    registry = CollectorRegistry()
    ModelsFileMetrics(MetricFamilies(registry), served=1)
    counted_loads(MetricFamilies(registry), MonotonicClock())
    watch_cells(MetricFamilies(registry), list, model="m", names=[])
    return {family.name for family in registry.collect()}


async def test_paths_do_not_multiply_metrics(gateway):
    for number in range(20):
        await gateway.http.get(f"/made/up/{number}")
    lines = (await gateway.http.get("/metrics")).text.splitlines()
    series = [line for line in lines if line.startswith("tandem_gateway_requests_total")]
    assert len(series) == 2
    assert any('endpoint="other"' in line and line.endswith(" 20.0") for line in series)


def test_two_gateways_in_one_process_do_not_share_metrics():
    first, second = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics(MetricFamilies(first), model="m").output_tokens.inc(5)
    GatewayMetrics(MetricFamilies(second), model="m")
    assert second.get_sample_value("tandem_gateway_generation_tokens_total", {"model_name": "m"}) == 0
