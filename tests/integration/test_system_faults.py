"""Processes that die or leave under load: what the clients see, and what is left behind.

Streams must say what they would have said without the fault. Where nobody can carry them on, each ends with
an error in OpenAI's shape, soon. Deaths of single workers are in tests/chaos.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from tandem_services.loadgen.stream_client import Measurement
from tandem_services.loadgen.workload import Lengths, RequestSpec, fixed_workload
from tandem_testing.system_client import GREEDY, Reference, Sampling, SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("system")]

LONG_ANSWERS = fixed_workload(Lengths(prompt=60, output=150, spread=0.4), 16, rate=None, seed=11)
NO_WORKER = ("error event: No worker can take", 'HTTP 503: {"error":{"message":"No worker can take')
"""After the first token, and before it."""
ERROR_WITHIN_S = 10.0


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


async def test_without_any_decode_worker_every_stream_ends_soon_and_says_why(fleet, reference):
    engines = [fleet.system.engine_pid(worker_id) for worker_id in ("decode-0", "decode-1")]
    died_at = []

    def kill_both() -> None:
        died_at.append(time.perf_counter())
        for pid in engines:
            os.kill(pid, signal.SIGKILL)

    with fleet.system.no_restarts():
        answers = await run_with_fault(fleet, LONG_ANSWERS, GREEDY, kill_both)

    failed = [answer for answer in answers if not answer.ok]
    assert failed
    for answer in failed:
        assert answer.error is not None
        assert answer.error.startswith(NO_WORKER), answer.error
        assert answer.ended is not None
        assert answer.ended - died_at[0] < ERROR_WITHIN_S
    await assert_unharmed([answer for answer in answers if answer.ok], reference, GREEDY)
    await fleet.all_ready(instead_of=engines)
    await fleet.settled()
    await assert_unharmed(await fleet.streams(LONG_ANSWERS), reference, GREEDY)
