"""A worker measures what its engine takes, and refuses to while requests run."""

import asyncio

import pytest

from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.outputs import EngineReply, Finish, FinishReason, OutputBatch, TokenOutput
from tandem_engine.messages.requests import AbortRequest, EngineRequest, GenerateRequest
from tandem_services.worker.engine_process import OrderRefusedError
from tandem_services.worker.rates import (
    BATCHES,
    CONTEXTS,
    PROMPTS,
    STEPS,
    Limits,
    Measurement,
    MeasurementError,
    RatesOrder,
    decode_points,
    geometric,
    output_tokens,
    prompt_lengths,
)
from tandem_services.worker.registration import LoadMonitor
from tandem_testing.mock_engine_process import idle_stats, ready_message
from tandem_testing.scheduler_builders import ManualClock

LIMITS = Limits(context_length=8192, max_running=64, pool_tokens=400_000)
PREFILL_RATE = 2000.0


def step_s(batch: int, context: int) -> float:
    return 0.01 + 0.001 * batch + 1e-6 * batch * context


class ScriptedEngine:
    """Computes one prompt a step, then tokens of all that decode; its time is its own."""

    def __init__(self, *, rate: float = PREFILL_RATE, error: str | None = None) -> None:
        self.rate = rate
        self.time = 0.0
        self.error = error
        self.waiting: list[GenerateRequest] = []
        self.running: dict[str, tuple[GenerateRequest, int]] = {}
        self.ended: list[str] = []
        self.most_running = 0

    def send(self, message: EngineRequest) -> bool:
        if isinstance(message, GenerateRequest):
            self.waiting.append(message)
        elif isinstance(message, AbortRequest) and self.running.pop(message.rid, None):
            self.ended.append(message.rid)
        return True

    async def receive(self) -> EngineReply:
        if self.error is not None:
            finish = Finish(reason=FinishReason.ERROR, error=self.error)
            return OutputBatch(outputs=(TokenOutput(rid=self.waiting[0].rid, index=0, finish=finish),))
        if self.ended:
            ended, self.ended = self.ended, []
            finish = Finish(reason=FinishReason.ABORT)
            return OutputBatch(outputs=tuple(TokenOutput(rid=rid, index=0, finish=finish) for rid in ended))
        decoding = list(self.running)
        if decoding:
            self.time += step_s(len(decoding), len(self.running[decoding[0]][0].input_ids))
        if self.waiting:
            request = self.waiting.pop(0)
            self.time += len(request.input_ids) / self.rate
            self.running[request.rid] = (request, 0)
            decoding.append(request.rid)
        self.most_running = max(self.most_running, len(decoding))
        return OutputBatch(outputs=tuple(self._token(rid) for rid in decoding))

    def _token(self, rid: str) -> TokenOutput:
        request, count = self.running[rid]
        self.running[rid] = (request, count + 1)
        last = count + 1 == request.sampling.max_tokens
        if last:
            del self.running[rid]
        return TokenOutput(
            rid=rid, index=count, token_ids=(1,), finish=Finish(reason=FinishReason.LENGTH) if last else None
        )


async def measured(engine: ScriptedEngine) -> Measurement:
    measurement = Measurement(send=engine.send, receive=engine.receive, limits=LIMITS, now=lambda: engine.time)
    seen = [progress async for progress in measurement.run()]
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    return measurement


def test_lengths_are_geometric_and_end_at_the_limits():
    assert geometric(1, 64, 4) == (1, 4, 16, 64)
    assert geometric(5, 5, 4) == (5,)
    assert len(prompt_lengths(LIMITS)) == PROMPTS
    assert max(prompt_lengths(LIMITS)) == LIMITS.context_length - 2
    assert len({batch for batch, _ in decode_points(LIMITS)}) == BATCHES
    assert len({context for _, context in decode_points(LIMITS)}) == CONTEXTS


def test_sequences_fit_into_half_of_the_pool():
    for batch, context in decode_points(LIMITS):
        assert batch * (context + output_tokens(batch, context)) <= LIMITS.pool_tokens / 2


async def test_prompts_and_steps_are_those_of_the_engine():
    engine = ScriptedEngine()
    found = await measured(engine)
    assert [prompt.seconds for prompt in found.prefill] == pytest.approx(
        [tokens / PREFILL_RATE for tokens in prompt_lengths(LIMITS)]
    )
    assert found.decode
    for each in found.decode:
        assert each.seconds == pytest.approx(step_s(each.batch, each.context))
    assert engine.running == {}
    assert engine.waiting == []


async def test_rate_measurement_skips_points_beyond_time_limit():
    engine = ScriptedEngine(rate=500.0)
    found = await measured(engine)
    assert engine.time < 300.0
    assert len(found.decode) < len(decode_points(LIMITS)), "prompts at this rate take longer than there is time"


async def test_error_of_the_engine_is_the_reason():
    with pytest.raises(MeasurementError, match="the pool is broken"):
        await measured(ScriptedEngine(error="the pool is broken"))


class Order:
    """With what is in its way."""

    def __init__(self, context: IpcContext) -> None:
        self.monitor = LoadMonitor(clock=ManualClock())
        self.monitor.begin()
        self.ready = ready_message("w1@1")
        self.changes = 0
        self.order = RatesOrder(
            context=context, monitor=self.monitor, ready=lambda: self.ready, state_changed=self.changed
        )

    def changed(self) -> None:
        self.changes += 1

    async def refusal(self, *, force: bool = False) -> str:
        with pytest.raises(OrderRefusedError) as caught:
            await anext(self.order.measure(force))
        return str(caught.value)


@pytest.fixture
def one():
    context = IpcContext()
    yield Order(context)
    context.close()


async def test_worker_with_requests_refuses_and_stays_routable(one):
    one.monitor.update(idle_stats(running=2, waiting=1))
    assert "3 requests run here" in await one.refusal()
    assert (one.changes, one.monitor.measuring) == (0, False)


async def test_forced_measurement_is_rejected_if_loading_or_draining(one):
    one.monitor.measuring = True
    assert "measured already" in await one.refusal(force=True)
    one.monitor.draining = True
    assert "drains" in await one.refusal(force=True)
    one.ready = None
    assert "loads the model" in await one.refusal(force=True)


async def test_paused_worker_refuses_instead_of_waiting_for_its_engine(one):
    one.monitor.update(idle_stats(paused=True))
    with pytest.raises(OrderRefusedError, match="resume it first") as caught:
        await anext(one.order.measure(True))
    assert caught.value.code == "unavailable", "--force would not help"


async def test_drain_ends_the_measurement(one, monkeypatch):
    async def measure(*_, **__):
        yield "first"
        yield "second"

    monkeypatch.setattr("tandem_services.worker.rates.measure", measure)
    items = one.order.measure(False)
    assert await anext(items) == "first"
    one.monitor.draining = True
    with pytest.raises(MeasurementError, match="drains"):
        await anext(items)
    assert not one.monitor.measuring


async def test_prompt_that_is_given_up_is_aborted():
    sent = []

    async def silent():
        raise TimeoutError

    measurement = Measurement(send=lambda message: sent.append(message) or True, receive=silent, limits=LIMITS)
    with pytest.raises(TimeoutError):
        await anext(measurement.run())
    assert [type(message) for message in sent] == [GenerateRequest, AbortRequest]
    assert sent[0].rid == sent[1].rid


async def test_full_queue_of_engine_leaves_no_sequences():
    sent = []

    def send(message) -> bool:
        sent.append(message)
        return not (isinstance(message, GenerateRequest) and len(sent) == 3)

    measurement = Measurement(send=send, receive=ScriptedEngine().receive, limits=LIMITS)
    with pytest.raises(MeasurementError, match="queue is full"):
        await measurement._steps(4, 64)
    asked, aborted = sent[:2], sent[3:]
    assert {one.rid for one in asked} == {one.rid for one in aborted}


async def test_rate_measurement_skips_too_slow_long_prompts():
    engine = ScriptedEngine(rate=40.0)
    found = await measured(engine)
    assert 2 <= len(found.prefill) < PROMPTS
    assert engine.time < 400.0


async def test_worker_takes_no_requests_while_it_is_measured(one, monkeypatch):
    states = []

    async def measure(*_, **__):
        states.append(one.monitor.state.value)
        yield "item"

    monkeypatch.setattr("tandem_services.worker.rates.measure", measure)
    assert [item async for item in one.order.measure(True)] == ["item"]
    assert states == ["standby"]
    assert (one.monitor.state.value, one.changes) == ("ready", 2)


async def test_client_that_leaves_ends_the_measurement(one, monkeypatch):
    over = asyncio.Event()

    async def measure(*_, **__):
        try:
            yield "first"
            await asyncio.sleep(60)
        finally:
            over.set()

    monkeypatch.setattr("tandem_services.worker.rates.measure", measure)
    items = one.order.measure(False)
    assert await anext(items) == "first"
    await items.aclose()
    assert over.is_set()
    assert not one.monitor.measuring


def test_decode_measurement_counts_enough_steps():
    assert output_tokens(1, 64) >= 2 * STEPS
