"""Processes that die or leave under load: what the clients see, and what is left behind.

Streams must say what they would have said without the fault. Where nobody can carry them on, each ends with
an error in OpenAI's shape, soon. Deaths of single workers are in tests/chaos.
"""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tandem_services.loadgen.stream_client import Measurement
from tandem_services.loadgen.workload import Lengths, RequestSpec, fixed_workload
from tandem_testing.system_client import GREEDY, Reference, Sampling, SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("system")]

LONG_ANSWERS = fixed_workload(Lengths(prompt=60, output=150, spread=0.4), 16, rate=None, seed=11)
NOBODY_FOR_S = 2.0
"""How long there is no decode worker, at least."""


async def attempts_lost(client: SystemClient) -> float:
    """Attempts so far that did not end by themselves."""
    attempts = await client.metric("tandem_gateway_attempts_total")
    return attempts - await client.metric('tandem_gateway_attempts_total{outcome="finished"}')


async def run_with_fault(
    client: SystemClient, specs: list[RequestSpec], sampling: Sampling, fault: Callable[[], None]
) -> list[Measurement]:
    """Answers to `specs` when `fault` happens as soon as two of them speak."""
    already = client.chunks.speaking
    running = asyncio.create_task(client.streams(specs, sampling))
    await until(lambda: client.chunks.speaking >= already + 2, 30.0, "streams speak")
    await asyncio.to_thread(fault)
    assert not running.done(), "the fault came too late"
    return await running


async def assert_unharmed(answers: list[Measurement], reference: Reference, sampling: Sampling) -> None:
    expected = await reference.texts([answer.spec for answer in answers], sampling)
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.text for answer in answers] == expected
    assert all(answer.output_tokens == answer.spec.max_tokens for answer in answers)


async def test_without_any_decode_worker_streams_wait_and_go_on_when_one_is_back(fleet, reference):  # B3.13
    engines = [fleet.system.engine_pid(worker_id) for worker_id in ("decode-0", "decode-1")]
    killed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill_both() -> None:
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        loop.call_soon_threadsafe(killed.set)

    with fleet.system.no_restarts():
        running = asyncio.create_task(run_with_fault(fleet, LONG_ANSWERS, GREEDY, kill_both))
        await killed.wait()
        given_up, _ = await asyncio.wait([running], timeout=NOBODY_FOR_S)
        assert not given_up
    await assert_unharmed(await running, reference, GREEDY)
    assert await fleet.metric("tandem_gateway_requests_quarantined_total") == 0
    await fleet.all_ready(instead_of=engines)
    await fleet.settled()
    await assert_unharmed(await fleet.streams(LONG_ANSWERS), reference, GREEDY)
