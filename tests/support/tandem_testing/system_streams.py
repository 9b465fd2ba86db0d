"""Streams of a running system in the middle of which something happens, and what they must have said."""

import asyncio
from collections.abc import Callable, Sequence

from tandem_services.loadgen.stream_client import Measurement
from tandem_services.loadgen.workload import RequestSpec
from tandem_testing.system_client import Reference, Sampling, SystemClient
from tandem_testing.waiting import until

SPEAK_TIMEOUT_S = 30.0
ENOUGH = 4
"""Running requests of a busy worker: one or two may end while it is told something."""


async def run_with(
    client: SystemClient,
    specs: Sequence[RequestSpec],
    sampling: Sampling,
    change: Callable[[], object],
    *,
    speaking: int | None = None,
    busy: str | None = None,
) -> list[Measurement]:
    """Answers to `specs` when `change` happens, in a thread, as soon as `speaking` of them speak; default: most.

    With `busy` not before the worker of that name runs some of them. Raises `AssertionError` when it came too late.
    """
    already = client.chunks.speaking
    awaited = already + (len(specs) - 2 if speaking is None else speaking)
    running = asyncio.create_task(client.streams(specs, sampling))
    await until(lambda: client.chunks.speaking >= awaited, SPEAK_TIMEOUT_S, "streams speak")
    if busy is not None:
        await until(lambda: _runs(client, busy), SPEAK_TIMEOUT_S, f"{busy} runs requests")
    await asyncio.to_thread(change)
    assert not running.done(), "the change came too late"
    return await running


async def _runs(client: SystemClient, worker_id: str) -> bool:
    return await client.metric("tandem_worker_num_requests_running", client.system.workers[worker_id]) >= ENOUGH


async def assert_unharmed(answers: Sequence[Measurement], reference: Reference, sampling: Sampling) -> None:
    """All of them complete, without an error, and word for word those of `reference`."""
    expected = await reference.texts([answer.spec for answer in answers], sampling)
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.text for answer in answers] == expected
    assert all(answer.output_tokens == answer.spec.max_tokens for answer in answers)


async def moved(client: SystemClient) -> float:
    """Attempts so far that another worker took over."""
    return await client.metric('tandem_gateway_attempts_total{outcome="moved"}')


async def lost(client: SystemClient) -> float:
    """Attempts so far that neither ended by themselves nor moved."""
    attempts = await client.metric("tandem_gateway_attempts_total")
    return attempts - await client.metric('tandem_gateway_attempts_total{outcome="finished"}') - await moved(client)
