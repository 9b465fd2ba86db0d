"""Clients that leave, or hardly read (14, 27 to 29)."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from tandem_testing.chaos.families.crashes import computing
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind
from tandem_testing.waiting import until

LEAK_FREE_S = 5.0
ABORTED_S = 1.0
CROWD = 1000
SLOW_READ_S = 15.0
GATEWAY_GROWTH_MIB = 64


async def idle_within(run: Run, seconds: float, what: str) -> None:
    """No engine has anything left to do after `seconds`, stretched for this machine."""

    async def idle() -> bool:
        reports = [await run.fleet.audit(worker) for worker in run.fleet.workers]
        return all(report is not None and report["idle"] and report["private_pages"] == 0 for report in reports)

    began = run.now()
    allowed = run.allowed(seconds)
    with contextlib.suppress(AssertionError):
        await until(idle, 30.0 + allowed, "every engine idle")
    took = run.now() - began
    run.expect(took <= allowed, f"{what}: engines were busy for another {took:.1f} s, {allowed:.1f} s are allowed")
    run.notes.append(f"{what}: idle after {took:.2f} s (bound {seconds:g} s)")


@scenario(14)
async def a_gateway_dies(run: Run) -> None:
    first, second = run.fleet.gateways
    wanted = run.asks(Kind.GREEDY, Kind.PLAIN)
    async with run.load(1) as hurt, run.load() as spared:
        spared.urls = [second.url]
        hurt.send(wanted[::2])
        spared.send(wanted[1::2])
        await until(lambda: hurt.speaking >= 2 and spared.speaking >= 2, PATIENCE_S, "streams speak")
        first.part.send(signal.SIGKILL)
        died = run.now()
        cut = await hurt.gathered()
        run.expect(any(answer.error for answer in cut), "no stream was on the gateway that died")
        await run.judge(await spared.gathered(), after=died)
    await idle_within(run, LEAK_FREE_S, "after the gateway's death")
    await run.fleet.all_ready(READY_TIMEOUT_S)
    async with run.load(1) as again:
        again.send(wanted[:4:2])
        await run.judge(await again.gathered())


@contextlib.asynccontextmanager
async def open_request(
    run: Run, *, stream: bool, prompt_words: int, tokens: int
) -> "AsyncIterator[asyncio.Task[None]]":
    """A request whose client leaves at the end of the block."""
    (ask,) = run.asks(Kind.PLAIN, count=1, prompt_words=prompt_words, tokens=tokens, first=700)
    body = ask.body(run.fleet.model) | {"stream": stream}
    if not stream:
        del body["stream_options"]

    async def send() -> None:
        async with httpx.AsyncClient(timeout=60.0) as http:
            await http.post(f"{run.fleet.gateways[0].url}/v1/completions", json=body)

    task = asyncio.create_task(send())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@scenario(27, quick=True)
async def clients_leave_at_every_stage(run: Run) -> None:
    left = await run.fleet.gateway_metric("tandem_gateway_client_disconnects_total")

    async def decoding() -> bool:
        return await run.fleet.worker_metric("num_requests_running", "decode") > 0

    for stream in (True, False):
        async with open_request(run, stream=stream, prompt_words=20, tokens=3000) as task:
            await until(decoding, PATIENCE_S, "it decodes")
            run.expect(not task.done(), "it ended before its client left")
        await idle_within(run, ABORTED_S, f"left while decoding, {'stream' if stream else 'whole'}")
    async with open_request(run, stream=True, prompt_words=2500, tokens=50) as task:
        await computing(run)
        run.expect(not task.done(), "it ended before its client left")
    await idle_within(run, ABORTED_S, "left during prefill")
    async with run.load() as crowd:
        # More than the engines run at once: some are still queued when all leave.
        crowd.send(run.asks(Kind.PLAIN, count=48, prompt_words=400, tokens=200, first=800))
        await until(lambda: crowd.begun >= 1, PATIENCE_S, "one speaks")
    await idle_within(run, ABORTED_S, "left in queue, prefill, transfer and decode")
    counted = await run.fleet.gateway_metric("tandem_gateway_client_disconnects_total") - left
    run.expect(counted >= 3, f"{counted:g} clients were counted as gone")
    await run.works()


@scenario(28)
async def a_thousand_clients_leave_at_once(run: Run) -> None:
    (model,) = run.asks(Kind.PLAIN, count=1, prompt_words=30, tokens=400, first=900)
    crowd = [replace(model, prompt=f"{number} {model.prompt}") for number in range(CROWD)]
    async with run.load() as load:
        load.send(crowd)
        await until(lambda: load.begun >= 8, PATIENCE_S, "some of them speak")
    await idle_within(run, LEAK_FREE_S, f"{CROWD} clients left")
    run.requests += CROWD
    await run.works()


@scenario(29)
async def a_client_hardly_reads(run: Run) -> None:
    gateway = run.fleet.gateways[0]
    before = resident_mib(gateway.part.pid)
    (ask,) = run.asks(Kind.PLAIN, count=1, prompt_words=20, tokens=3000, first=950)
    slow = await asyncio.to_thread(slow_reader, gateway.url, msgspec.json.encode(ask.body(run.fleet.model)))
    try:
        since = run.now()
        async with run.load(1) as load:
            load.send(run.asks(Kind.GREEDY, count=8, tokens=64))
            answers = await load.gathered()
        await run.judge(answers, after=since)
        for _ in range(int(SLOW_READ_S)):
            await asyncio.to_thread(slow.recv, 1)
            await asyncio.sleep(1.0)
        grown = resident_mib(gateway.part.pid) - before
        run.expect(grown < GATEWAY_GROWTH_MIB, f"the gateway grew by {grown:.0f} MiB for a slow reader")
        run.notes.append(f"the gateway grew by {grown:.1f} MiB")
    finally:
        slow.close()
    await run.works()


def slow_reader(url: str, body: bytes) -> socket.socket:
    """A client with the smallest receive buffer there is; it has sent its request and read nothing."""
    address = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.settimeout(30.0)
    client.connect((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * 4096 / 2**20
