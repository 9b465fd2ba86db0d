"""When workers are few: which requests wait, are refused, or get no other worker."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_services.router.registry import Endings, WorkerState
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.healthy_engines import healthy
from tandem_testing.loop_time import set_forward
from tandem_testing.metric_text import metric_sum
from tandem_testing.service_clock import ServiceClock
from tandem_testing.waiting import until

PATIENCE_S = 60.0
POISON = (9, 9, 9)
BROKEN = Finish(reason=FinishReason.ERROR, code="engine_stopped", retryable=True)


@pytest.fixture
def serving(rack, tokenizer):
    """A gateway in front of the rack."""
    return lambda **config: live_gateway(rack.context, tokenizer, rack.engines, **config)


async def metric(gateway, name: str) -> float:
    return metric_sum((await gateway.http.get("/metrics")).text, name)


# Poison


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_crashed_two_workers_is_quarantined(rack, serving, stream):
    for name in ("a", "b", "c"):
        rack.add(name, healthy(dies_of=POISON))
    async with serving() as gateway:
        answer = await gateway.complete(list(POISON), max_tokens=9, stream=stream)
        again = await gateway.complete(list(POISON), max_tokens=9)
        harmless = await gateway.complete([1, 2], max_tokens=9)
        assert await metric(gateway, "tandem_gateway_requests_quarantined_total") == 1
        assert await metric(gateway, "tandem_gateway_quarantine_refusals_total") == 1
    for refused in (answer, again):
        assert refused.status_code == 500
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("InternalServerError", "request_quarantined")
    assert harmless.status_code == 200
    assert [POISON in [r.input_ids for r in engine.received] for engine in rack.engines] == [True, True, False]


async def test_requests_lost_with_poison_request_resume(rack, serving):
    """The poison request is not known at first; only the one that crashes a worker again is refused."""
    first = rack.add("a", healthy(dies_of=POISON, hold_at=10))
    for name in ("b", "c"):
        rack.add(name, healthy(dies_of=POISON))
    async with serving() as gateway:
        harmless_requests = [asyncio.ensure_future(gateway.complete([5, n], max_tokens=60, seed=n)) for n in range(3)]
        assert await asyncio.to_thread(first.wait_until, lambda: first.emitted == 30)
        poison = await gateway.complete(list(POISON), max_tokens=9)
        answers = [await harmless for harmless in harmless_requests]
    assert poison.status_code == 500
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [60] * 3


async def test_requests_lost_early_with_poison_request_get_a_retry(rack, serving):
    first = rack.add("a", healthy(dies_of=POISON, hold_at=1))
    for name in ("b", "c", "d"):
        rack.add(name, healthy(dies_of=POISON, step_s=0.05))
    async with serving() as gateway:
        harmless_requests = [asyncio.ensure_future(gateway.complete([5, n], max_tokens=9, seed=n)) for n in range(3)]
        assert await asyncio.to_thread(first.wait_until, lambda: len(first.received) == 3)
        poison = await gateway.complete(list(POISON), max_tokens=9)
        answers = [await harmless for harmless in harmless_requests]
    assert (poison.status_code, poison.json()["error"]["code"]) == (500, "request_quarantined")
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [9] * 3


@dataclass
class KilledForMemory:
    """The parents of all lost workers report that the kernel killed their engines."""

    queries: int = 0
    late: int = 0
    """Calls before the reports arrive."""

    async def endings(self, incarnations: Iterable[str]) -> Endings:
        self.queries += 1
        ended = frozenset(incarnations if self.queries > self.late else ())
        return Endings(ended=ended, for_memory=ended)


async def test_oom_kills_do_not_quarantine_the_request(rack, serving):
    for name in ("a", "b", "c", "d"):
        rack.add(name, healthy(dies_of=POISON))
    async with serving(end_reports=KilledForMemory(late=2)) as gateway:
        answer = await gateway.complete(list(POISON), max_tokens=9)
        assert await metric(gateway, "tandem_gateway_requests_quarantined_total") == 0
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "ran out of memory" in answer.json()["error"]["message"]
    assert [POISON in [r.input_ids for r in engine.received] for engine in rack.engines] == [True, True, True, False]


async def test_requests_in_a_crowd_outlive_workers_out_of_memory(rack, serving):
    for nth in range(5):
        rack.add(f"w{nth}", healthy(dies_of=POISON, hold_at=1))
    rack.add("last", healthy())
    async with serving(end_reports=KilledForMemory()) as gateway:
        answers = [asyncio.ensure_future(gateway.complete([5, n], max_tokens=9, seed=n)) for n in range(3)]
        for engine in rack.engines[:-1]:
            assert await asyncio.to_thread(engine.wait_until, lambda engine=engine: len(engine.received) == 3)
            engine.stop()
        done = [await answer for answer in answers]
    assert [answer.json()["usage"]["completion_tokens"] for answer in done] == [9] * 3


async def test_stream_resumes_on_many_workers_while_progressing(rack, serving):
    for nth in range(5):
        rack.add(f"w{nth}", healthy(die_after=20))
    rack.add("last", healthy())
    async with serving() as gateway:
        answer = await gateway.complete(max_tokens=110, seed=1)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 110
    assert all(engine.received for engine in rack.engines)


async def test_workers_that_were_dead_before_cost_no_attempt(rack, serving):  # [streams-wait]
    """All workers die at once; their streams meet dead ones first, and are not blamed."""
    rack.add("first", healthy(die_after=3))
    corpses = [rack.add(f"dead-{nth}", healthy()) for nth in range(4)]
    rack.add("alive", healthy())
    for corpse in corpses:
        corpse.stop()
    async with serving() as gateway:
        answer = await gateway.complete(max_tokens=9, seed=1)
        assert await metric(gateway, "tandem_gateway_requests_quarantined_total") == 0
        assert await metric(gateway, 'tandem_gateway_attempts_total{outcome="unreachable"}') == 4
    assert answer.status_code == 200


# Budget


async def test_retries_on_a_failing_fleet_are_limited_by_budget(rack, serving):
    rack.add("broken", healthy(refuse=BROKEN))
    async with serving() as gateway:
        answers = await asyncio.gather(*[gateway.complete(max_tokens=3) for _ in range(200)])
        refused = [answer for answer in answers if answer.status_code == 503]
        assert await metric(gateway, "tandem_gateway_retries_refused_total") == len(refused) > 0
    assert all("retry-after" in answer.headers for answer in refused)
    # Without a budget each would be tried three times.
    assert len(rack.engines[0].received) < 600


# Waiting


async def test_new_request_waits_for_a_worker_to_come_back(rack, serving):  # [streams-wait]
    worker = rack.add("w", healthy())
    async with serving() as gateway:
        assert (await gateway.complete(max_tokens=3)).status_code == 200
        gateway.chooser.fleet.clear()
        waiting = asyncio.ensure_future(gateway.complete(max_tokens=3))
        await until_waiting(gateway, 1)
        gateway.chooser.fleet.append(worker.view)
        assert (await waiting).status_code == 200
        assert await metric(gateway, "tandem_gateway_num_requests_waiting") == 0


async def test_waiting_requests_are_bounded_in_number_and_time(rack, serving):  # [streams-wait]
    rack.add("w", healthy())
    clock = ServiceClock()
    async with serving(max_waiting=1, queue_s=10.0, clock=clock) as gateway:
        assert (await gateway.complete(max_tokens=3)).status_code == 200
        gateway.chooser.fleet.clear()
        waiting = asyncio.ensure_future(gateway.complete(max_tokens=3))
        await until_waiting(gateway, 1)
        refused = await gateway.complete(max_tokens=3)
        assert not waiting.done()
        clock.advance(10.0)
        for answer in (refused, await waiting):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "2"


async def test_started_stream_without_workers_ends_with_timeout_error(rack, serving):  # [streams-wait]
    rack.add("only", healthy(die_after=3))
    body = {"model": "mock", "prompt": [7, 8], "max_tokens": 30, "stream": True}
    async with (
        serving(recovery_s=float("inf"), request_timeout_s=30.0) as gateway,
        gateway.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        assert "error" not in await anext(lines)
        await gateway.chooser.death.wait()
        set_forward(30.0)
        rest = [line.removeprefix("data: ") async for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["type"] == "TimeoutError"
    assert sum("error" in line for line in rest) == 1


async def until_waiting(gateway, count: int) -> None:
    async def waiting() -> bool:
        return await metric(gateway, "tandem_gateway_num_requests_waiting") == count

    await until(waiting, PATIENCE_S, f"{count} wait")


# Without prefill workers


async def test_decode_workers_compute_prompts_without_prefill_workers(rack, serving):  # [decode-computes-prompts]
    decode = rack.add("d", healthy(), Role.DECODE)
    async with serving() as gateway:
        assert (await gateway.complete(max_tokens=3)).status_code == 200
        assert await metric(gateway, 'tandem_gateway_placements_total{placement="degraded"}') == 1
    assert decode.received[0].handoff is None


async def test_decode_workers_compute_no_prompts_if_prefill_fallback_is_off(rack, serving):  # [decode-computes-prompts]
    decode = rack.add("d", healthy(), Role.DECODE)
    async with serving(prefill_fallback=False, queue_s=0.2) as gateway:
        answer = await gateway.complete(max_tokens=3)
        assert gateway.chooser.open == 0
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert not decode.received


async def test_paused_workers_are_retried_after_an_interval(rack, serving):
    paused = Finish(reason=FinishReason.ERROR, code="paused", retryable=True)
    workers = [rack.add(name, healthy(fail_after=(0, paused))) for name in ("a", "b")]
    async with serving(recovery_s=10.0) as gateway:
        answering = asyncio.ensure_future(gateway.complete([1, 2], max_tokens=9))
        await until(lambda: all(worker.received for worker in workers), PATIENCE_S, "both have sent it away")
        for worker in workers:
            worker.behavior.fail_after = None
        assert (await answering).status_code == 200
        assert set(gateway.chooser.refusals) == {(worker.view.incarnation, WorkerState.PAUSED) for worker in workers}
    assert max(len(worker.received) for worker in workers) <= 3


async def test_only_draining_rejections_are_reported_to_router(rack, serving):
    rack.add("a", healthy(fail_after=(0, Finish(reason=FinishReason.ERROR, code="draining", retryable=True))))
    rack.add("b", healthy(fail_after=(0, Finish(reason=FinishReason.ERROR, code="engine_error", retryable=True))))
    rack.add("c", healthy())
    async with serving() as gateway:
        assert (await gateway.complete(max_tokens=3)).status_code == 200
        assert gateway.chooser.refusals == [("a@1", WorkerState.DRAINING)]
