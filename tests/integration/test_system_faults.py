"""Processes that die or leave under load: what the clients see, and what is left behind.

Streams must have the output that they have without the fault. Where no worker can resume them, each ends with
an error in OpenAI's shape, soon. Deaths of single workers are in tests/chaos.
"""

import asyncio
import os
import signal

import pytest

from tandem_lab.bench.load import Lengths, fixed_workload
from tandem_testing.system_client import GREEDY
from tandem_testing.system_streams import assert_unharmed, run_with

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

LONG_ANSWERS = fixed_workload(Lengths(prompt=60, output=300, spread=0.4), 16, rate=None, seed=11)
NOBODY_FOR_S = 2.0
"""How long there is no decode worker, at least."""


async def test_streams_resume_when_a_decode_worker_returns(fleet, reference):  # [streams-wait]
    engines = [fleet.system.engine_pid(worker_id) for worker_id in ("decode-0", "decode-1")]
    killed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill_both() -> None:
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        loop.call_soon_threadsafe(killed.set)

    with fleet.system.no_restarts():
        # What has not begun waits for `queue_s` alone, less than a restart may take.
        running = asyncio.create_task(run_with(fleet, LONG_ANSWERS, GREEDY, kill_both, speaking=len(LONG_ANSWERS)))
        await killed.wait()
        given_up, _ = await asyncio.wait([running], timeout=NOBODY_FOR_S)
        assert not given_up
    await assert_unharmed(await running, reference, GREEDY)
    assert await fleet.metric("tandem_gateway_requests_quarantined_total") == 0
    await fleet.all_ready(instead_of=engines)
    await fleet.settled()
    await assert_unharmed(await fleet.streams(LONG_ANSWERS), reference, GREEDY)
