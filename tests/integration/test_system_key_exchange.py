"""Another key file for the sockets [secrets-reread]: a second fleet takes over, and no client loses an answer.

The procedure of docs/operations.md, with a proxy in place of the Service that clients use.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from tandem_lab.bench.load import Lengths, fixed_workload
from tandem_testing.system import System
from tandem_testing.system_client import GREEDY, SystemClient
from tandem_testing.system_streams import assert_unharmed
from tandem_testing.tcp_proxy import TcpProxy
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("system")]

PATIENT_S = 60.0
REDIS = ("--redis-url", "--redis-password-file")
ENGINE = ("--threads", "1", "--kv-cache-gib", "0.1", "--dtype", "float32")
BEFORE = fixed_workload(Lengths(prompt=60, output=900, spread=0.4), 8, rate=None, seed=53)
AFTER = fixed_workload(Lengths(prompt=60, output=60, spread=0.4), 8, rate=None, seed=54)


@pytest.fixture
def old(fleet, tmp_path) -> Iterator[System]:
    """A fleet that has keys of its own, in the Redis of `fleet`."""
    gateway = next(one for one in fleet.system.processes() if "gateway" in one.argv)
    redis = [word for name in REDIS if (value := gateway.flag(name)) is not None for word in (name, value)]
    flags = ("--prefill", "0", "--decode", "0", "--both", "1", "--cluster", "old", *redis, *ENGINE)
    system = System.start(tmp_path / "old", *flags)
    yield system
    system.close()


async def test_key_exchange_with_second_fleet_loses_no_response(old, fleet, reference):
    assert (old.run_dir / "keys.json").read_bytes() != (fleet.system.run_dir / "keys.json").read_bytes()
    serving = old

    def address() -> tuple[str, int]:
        parts = urlsplit(serving.url)
        return str(parts.hostname), int(parts.port or 0)

    front = await TcpProxy.open(address)
    seen_by_clients = replace(old, url=f"http://127.0.0.1:{front.port}")
    try:
        async with SystemClient(system=seen_by_clients) as first:
            running = asyncio.create_task(first.streams(BEFORE, GREEDY))
            await until(lambda: first.chunks.speaking >= len(BEFORE) // 2, PATIENT_S, "streams speak")
            serving = fleet.system
            with old.no_restarts():
                leaver = old.gateway_pid()
                os.kill(leaver, signal.SIGTERM)
                assert not running.done(), "the exchange came too late"
                # On new connections: the old gateway may end an idle one at any moment, which the proxy of this busy
                # process passes on late.
                async with SystemClient(system=seen_by_clients) as second:
                    await assert_unharmed(await second.streams(AFTER, GREEDY), reference, GREEDY)
                await assert_unharmed(await running, reference, GREEDY)
                await until(lambda: _ended(old, leaver), PATIENT_S, "the old gateway has finished")
            old.close()
        async with SystemClient(system=seen_by_clients) as third:
            await assert_unharmed(await third.streams(AFTER, GREEDY), reference, GREEDY)
    finally:
        await front.close()
    await fleet.all_ready()


def _ended(system: System, pid: int) -> bool:
    return all(process.pid != pid for process in system.processes())
