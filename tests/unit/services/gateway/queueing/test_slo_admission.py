"""Which requests are rejected because of their objectives, and when they are to come back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_services.common.errors import ApiError
from tandem_services.common.metrics import MetricFamilies, new_registry
from tandem_services.gateway.objectives import Objectives, SloMode
from tandem_services.gateway.observe.predictions import Predictions
from tandem_services.gateway.queueing.slo_admission import MAX_PROMISES, MAX_RETRY_S, Promises, SloAdmission
from tandem_services.router.calibration import MIN_SAMPLES, WINDOW, Measured
from tandem_services.router.decision import Latency, ScoreTerm
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock

BUSY = (ScoreTerm("prefill_queue", 0.5), ScoreTerm("decode_load", 0.1))
OBJECTIVES = Objectives(ttft_s=1.0, itl_s=0.1)


class Gate:
    """A gateway whose workers are predicted to need `ttft_s` and `itl_s`."""

    def __init__(self, mode: SloMode) -> None:
        self.clock, self.registry = ServiceClock(), new_registry()
        families = MetricFamilies(self.registry)
        self.admission = SloAdmission(
            families,
            model="m",
            mode=mode,
            clock=self.clock,
            predictions=Predictions(families, model="m", clock=self.clock),
        )

    def judge(
        self,
        *,
        ttft_s: float = 0.1,
        queue_s: float = 0.0,
        itl_s: float = 0.01,
        priority: int = 0,
        waited_s: float = 0.0,
        terms: tuple[ScoreTerm, ...] = BUSY,
        objectives: Objectives | None = OBJECTIVES,
        work_s: float = 0.0,
        tenant: str = "t",
    ) -> ApiError | None:
        terms_of_ttft = (ScoreTerm("prefill_queue", queue_s), ScoreTerm("prefill_compute", ttft_s))
        latency = Latency(terms=terms_of_ttft, itl_s=itl_s, kind="k", decode_kind="k")
        choice = replace(make_choice("r", make_view("w"), terms=terms), latency=latency)
        return self.admission.judge(
            choice, objectives, tenant=tenant, priority=priority, waited_s=waited_s, work_s=lambda: work_s
        )

    def kept(self, value: str) -> float | None:
        return self.registry.get_sample_value("tandem_gateway_retry_promises_total", {"model_name": "m", "kept": value})


@pytest.mark.parametrize("priority", [-1, 0])
def test_observing_gateway_rejects_nothing(priority):
    gate = Gate(SloMode.OBSERVE)
    assert gate.judge(ttft_s=1e3, itl_s=1e3, priority=priority) is None
    gate.admission.judge_wait(OBJECTIVES, tenant="t", priority=priority, wait_s=1e6, work_s=lambda: 1.0)


@pytest.mark.parametrize(
    ("request_", "rejected"),
    [
        ({"ttft_s": 1.1, "priority": -1}, True),
        ({"itl_s": 0.11, "priority": -1}, True),
        ({"waited_s": 1.0, "priority": -1}, True),
        ({"ttft_s": 0.9, "itl_s": 0.09, "priority": -1}, False),
        ({"ttft_s": 1e3, "priority": 0}, False),
        ({"ttft_s": 1e3, "priority": -1, "terms": ()}, False),
        ({"ttft_s": 1e3, "priority": -1, "objectives": None}, False),
    ],
)
def test_slo_shed_rejects_low_priority_requests_when_busy(request_, rejected):
    error = Gate(SloMode.SHED).judge(**request_)
    assert (error is not None) == rejected
    if error is not None:
        assert (error.status, error.reason) == (429, "slo_unattainable")


@pytest.mark.parametrize(
    ("request_", "rejected"),
    [
        ({"ttft_s": 2.1}, True),
        ({"itl_s": 0.21}, True),
        ({"ttft_s": 1.0, "waited_s": 1.1}, True),
        ({"ttft_s": 1.9, "itl_s": 0.19}, False),
        ({"ttft_s": 2.1, "terms": ()}, False),
        ({"ttft_s": 2.1, "objectives": Objectives(itl_s=0.1)}, False),
        ({"itl_s": 0.21, "objectives": Objectives(ttft_s=1.0)}, False),
    ],
)
def test_strict_gateway_rejects_what_takes_twice_its_objective(request_, rejected):
    assert (Gate(SloMode.STRICT).judge(**request_) is not None) == rejected


@pytest.mark.parametrize(
    ("mode", "priority", "may"),
    [(SloMode.STRICT, 5, True), (SloMode.SHED, -1, True), (SloMode.SHED, 0, False), (SloMode.OBSERVE, -1, False)],
)
def test_request_that_may_be_rejected_is_known_before(mode, priority, may):
    assert Gate(mode).admission.may_reject(priority) is may


@pytest.mark.parametrize(
    ("mode", "priority", "wait_s", "rejected"),
    [
        (SloMode.STRICT, 5, 2.1, True),
        (SloMode.STRICT, 5, 1.9, False),
        (SloMode.SHED, -1, 1.1, True),
        (SloMode.SHED, 0, 1e6, False),
    ],
)
def test_request_behind_others_is_judged_by_its_wait(mode, priority, wait_s, rejected):
    gate = Gate(mode)
    if not rejected:
        gate.admission.judge_wait(OBJECTIVES, tenant="t", priority=priority, wait_s=wait_s, work_s=lambda: 0.0)
        return
    with pytest.raises(ApiError) as error:
        gate.admission.judge_wait(OBJECTIVES, tenant="t", priority=priority, wait_s=wait_s, work_s=lambda: 0.0)
    assert error.value.retry_after == pytest.approx(wait_s - 1.0)


def test_retry_after_of_requests_rejected_together_is_staggered():  # [retries-spread]
    """200 in one moment, each of which takes the fleet 0.1 s, behind 3 s of other work."""
    gate = Gate(SloMode.STRICT)
    times = []
    for _ in range(200):
        error = gate.judge(queue_s=3.9, work_s=0.1)
        assert error is not None
        assert error.retry_after is not None
        times.append(error.retry_after)
    assert times == pytest.approx([3.0 + 0.1 * number for number in range(200)])


def test_rejected_flood_leaves_times_of_other_tenants():
    gate = Gate(SloMode.STRICT)
    for _ in range(200):
        assert gate.judge(tenant="flood", queue_s=3.9, work_s=10.0) is not None
    error = gate.judge(tenant="other", queue_s=3.9, work_s=10.0)
    assert error is not None
    assert error.retry_after == pytest.approx(3.0)


def test_promises_of_drained_tenants_are_forgotten():
    clock = ServiceClock()
    promises = Promises(clock=clock)
    for number in range(3 * MAX_PROMISES):
        promises.make(f"t{number}", drain_s=0.0, work_s=0.5)
        clock.advance(1.0)
    assert len(promises._drained_at) <= MAX_PROMISES


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.floats(0, 50)), min_size=1, max_size=50))
def test_promised_times_are_in_the_future_and_in_order(rejections):
    clock = ServiceClock()
    promises = Promises(clock=clock)
    last = 0.0
    for drain_s, work_s, passed_s in rejections:
        clock.advance(passed_s)
        retry_s = promises.make("t", drain_s=drain_s, work_s=work_s)
        assert 0.0 <= retry_s <= MAX_RETRY_S
        assert retry_s >= min(drain_s, MAX_RETRY_S) - 1e-6
        assert clock.now() + retry_s >= last - 1e-6
        last = clock.now() + retry_s


def test_booked_work_drains_as_time_passes():
    clock = ServiceClock()
    promises = Promises(clock=clock)
    for _ in range(10):
        promises.make("t", drain_s=0.0, work_s=1.0)
    assert promises.make("t", drain_s=0.0, work_s=1.0) == pytest.approx(10.0)
    clock.advance(60.0)
    assert promises.make("t", drain_s=2.0, work_s=1.0) == pytest.approx(2.0)


def test_promises_are_counted_when_their_time_has_come():
    gate = Gate(SloMode.STRICT)
    for _ in range(3):
        assert gate.judge(queue_s=3.9) is not None
    assert gate.judge(ttft_s=0.1) is None
    assert (gate.kept("true"), gate.kept("false")) == (None, None)
    gate.clock.advance(3.5)
    assert gate.judge(ttft_s=0.1) is None
    assert (gate.kept("true"), gate.kept("false")) == (3, None)
    assert gate.judge(queue_s=3.9) is not None
    gate.clock.advance(3.5)
    assert gate.judge(ttft_s=1.5) is None
    assert (gate.kept("true"), gate.kept("false")) == (3, 1)


def test_prompt_with_unattainable_ttft_gets_no_retry_after():
    gate = Gate(SloMode.STRICT)
    error = gate.judge(ttft_s=2.1, queue_s=5.0, work_s=1.0)
    assert error is not None
    assert (error.status, error.reason, error.retry_after) == (429, "slo_unattainable", None)
    behind = gate.judge(queue_s=3.9)
    assert behind is not None
    assert behind.retry_after == pytest.approx(3.0)


def test_idle_worker_corrects_a_model_that_rejects_everything():
    """A few slow requests at the start, such as those for which kernels are compiled."""
    gate = Gate(SloMode.STRICT)
    predictions = gate.admission._predictions
    latency = Latency(terms=(ScoreTerm("prefill_compute", 0.4),), itl_s=0.01, kind="k", decode_kind="k")
    choice = replace(make_choice("r", make_view("w"), terms=()), latency=latency)

    def finish(ttft_s: float) -> None:
        predicted = predictions.predict(choice, gateway_wait_s=0.0)
        assert predicted is not None
        measured = Measured(ttft_s=ttft_s, queue_s=0.0, prefill_s=ttft_s, itl_s=0.01)
        predictions.calibration.learn(predicted, measured)

    for _ in range(MIN_SAMPLES):
        finish(30.0)
    assert gate.judge(ttft_s=0.4) is not None
    for _ in range(WINDOW):
        assert gate.judge(ttft_s=0.4, terms=()) is None
        finish(0.4)
    assert gate.judge(ttft_s=0.4) is None


def test_step_under_way_does_not_make_a_prompt_too_long():
    gate = Gate(SloMode.STRICT)
    latency = Latency(
        terms=(ScoreTerm("prefill_compute", 1.9), ScoreTerm("decode_step", 0.2)), itl_s=0.01, kind="k", decode_kind="k"
    )
    choice = replace(make_choice("r", make_view("w"), terms=BUSY), latency=latency)
    error = gate.admission.judge(
        choice, Objectives(ttft_s=1.0), tenant="t", priority=0, waited_s=0.0, work_s=lambda: 0.0
    )
    assert error is not None
    assert error.retry_after is not None
