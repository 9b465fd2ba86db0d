"""The operator's calls to real workers and a real gateway: load, canaries, flips."""

import asyncio
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tandem_operator.scaling.load import Load
from tandem_operator.telemetry.autoscaler import Flip, order_flip
from tandem_operator.telemetry.pods import PodSeen, pod_client
from tandem_operator.telemetry.samples import LoadReader, LoadReading
from tandem_operator.telemetry.worker_control import order_token, pair_of, run_canary
from tandem_services.common.sockets import free_port
from tandem_testing.system import tandem_command
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

PATIENT_S = 60.0
TAKEN_OVER = ("--model", "--served-model-name", "--redis-url", "--redis-password-file", "--cluster", "--curve-keys")


def seen_as_pod(name: str, role, port_name: str, port: int) -> PodSeen:
    return PodSeen(name=name, uid=name, ip="127.0.0.1", role=role, revision="r1", ready=True, ports={port_name: port})


@pytest.fixture
def workers(fleet) -> list[PodSeen]:
    return [
        seen_as_pod(name, name.partition("-")[0], "health", urlsplit(url).port or 0)
        for name, url in sorted(fleet.system.workers.items())
    ]


@asynccontextmanager
async def another_gateway(fleet) -> AsyncIterator[tuple[PodSeen, str]]:
    """A second gateway of the fleet, with a port for administrators; and where it serves."""
    first = next(one for one in fleet.system.processes() if "gateway" in one.argv)
    port, admin = free_port(), free_port()
    flags = [word for name in TAKEN_OVER if (value := first.flag(name)) is not None for word in (name, value)]
    command = tandem_command("gateway", "--port", str(port), "--admin-port", str(admin), *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:

        async def ready() -> bool:
            assert process.returncode is None, "the gateway has ended"
            try:
                return (await fleet.http.get(f"{url}/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, PATIENT_S, "the second gateway is ready")
        yield seen_as_pod("g", "gateway", "admin", admin), url
    finally:
        process.terminate()
        async with asyncio.timeout(PATIENT_S):
            await process.wait()


async def looked(reader: LoadReader, pods: list[PodSeen]) -> tuple[LoadReading, Load]:
    seen = await reader.read(pods)
    assert seen.load is not None, seen.reason
    assert seen.load.error() == ""
    return seen, seen.load


async def test_load_canaries_and_flips(fleet, workers):
    token = order_token((fleet.system.run_dir / "keys.json").read_bytes())
    async with another_gateway(fleet) as (gateway, url), pod_client() as client:
        pods = [gateway, *workers]
        reader = LoadReader(client=client)
        assert "second sample" in (await reader.read(pods)).reason
        _, load = await looked(reader, pods)
        assert load.decode.worker_places > 0
        assert load.decode.worker_pages > 0
        assert load.prefill.worker_tokens_per_s > 0, "measured by the self-test, before anybody came"

        body = {"model": fleet.model, "prompt": "one two three", "max_tokens": 8, "ignore_eos": True}
        assert (await fleet.http.post(f"{url}/v1/completions", json=body)).status_code == 200
        _, load = await looked(reader, pods)
        assert load.decode.arrived_per_s > 0
        assert load.prefill.arrived_tokens_per_s > 0

        pair = pair_of("r1", workers)
        assert pair is not None
        canary = await run_canary(client, gateway, token, pair=pair)
        assert canary.passed, canary
        assert f"from {pair[0].name} to {pair[1].name}" in canary.message
        canary = await run_canary(client, gateway, token)
        assert canary.passed, canary
        _, load = await looked(reader, pods)
        assert load.decode.arrived_per_s == 0, "canaries are nobody's requests"

        flipped = next(pod for pod in workers if pod.name == "decode-1")
        await order_flip(client, Flip(flipped, "prefill"), token)
        seen, _ = await looked(reader, pods)
        assert seen.serves(flipped) == "prefill"
        await order_flip(client, Flip(flipped, "decode"), token)
        seen, _ = await looked(reader, pods)
        assert seen.serves(flipped) == "decode"
    await fleet.settled()
