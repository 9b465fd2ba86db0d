"""Streams of a running system in the middle of which something happens, and their required output."""

import asyncio
from collections.abc import Callable, Sequence

from tandem_lab.bench.load import Measurement, RequestSpec
from tandem_testing.metric_text import metric_sum
from tandem_testing.system_client import Reference, Sampling, SystemClient
from tandem_testing.waiting import until

SPEAK_TIMEOUT_S = 60.0
ENOUGH = 4
"""Running requests of a busy worker: one or two may end while it gets a command."""


async def run_with(
    client: SystemClient,
    specs: Sequence[RequestSpec],
    sampling: Sampling,
    change: Callable[[], object],
    *,
    speaking: int | None = None,
) -> list[Measurement]:
    """Answers to `specs` when `change` happens, in a thread, as soon as `speaking` of them speak; default: most.

    Raises `AssertionError` when it came too late.
    """
    running = await _begun(client, specs, sampling, speaking)
    assert not running.done(), "the change came too late"
    await asyncio.to_thread(change)
    return await running


async def run_with_busiest(
    client: SystemClient,
    specs: Sequence[RequestSpec],
    sampling: Sampling,
    change: Callable[[str], object],
    *,
    among: Sequence[str],
    speaking: int | None = None,
) -> list[Measurement]:
    """As `run_with`; `change` gets the worker of `among` that runs most of them.

    Which one that is, is the router's business: it depends on what each has cached and on what it costs at the moment.
    """
    running = await _begun(client, specs, sampling, speaking)
    busiest = await _busiest(client, among, running)
    await asyncio.to_thread(change, busiest)
    return await running


async def _begun(
    client: SystemClient, specs: Sequence[RequestSpec], sampling: Sampling, speaking: int | None
) -> "asyncio.Task[list[Measurement]]":
    awaited = client.chunks.speaking + (len(specs) - 2 if speaking is None else speaking)
    running = asyncio.create_task(client.streams(specs, sampling))
    await until(lambda: client.chunks.speaking >= awaited, SPEAK_TIMEOUT_S, "streams speak")
    return running


async def _busiest(client: SystemClient, among: Sequence[str], running: "asyncio.Task[list[Measurement]]") -> str:
    loads: dict[str, float] = {}

    async def busy() -> bool:
        assert not running.done(), f"all streams ended before a worker had {ENOUGH}: {loads}"
        for worker_id in among:
            url = client.system.workers[worker_id]
            loads[worker_id] = await client.metric("tandem_worker_num_requests_running", url)
        return max(loads.values()) >= ENOUGH

    await until(busy, SPEAK_TIMEOUT_S, "a worker runs some of them", loads.copy)
    return max(loads, key=lambda worker_id: loads[worker_id])


async def assert_unharmed(answers: Sequence[Measurement], reference: Reference, sampling: Sampling) -> None:
    """All of them complete, without an error, and word for word those of `reference`."""
    expected = await reference.texts([answer.spec for answer in answers], sampling)
    errors = [answer.error for answer in answers if answer.error is not None]
    assert not errors, f"{len(errors)} of {len(answers)} answers failed: {errors}"
    assert [answer.text for answer in answers] == expected
    assert all(answer.output_tokens == answer.spec.max_tokens for answer in answers)


async def moved(client: SystemClient) -> float:
    """Attempts so far that another worker took over."""
    return await client.metric('tandem_gateway_attempts_total{outcome="moved"}')


async def lost(client: SystemClient) -> float:
    """Attempts so far that neither ended by themselves nor moved."""
    text = (await client.http.get("/metrics")).text
    ended = {
        kind: metric_sum(text, f'tandem_gateway_attempts_total{{outcome="{kind}"}}') for kind in ("finished", "moved")
    }
    return metric_sum(text, "tandem_gateway_attempts_total") - sum(ended.values())
