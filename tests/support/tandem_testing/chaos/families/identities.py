"""Workers with a wrong identity, clocks that are wrong, and a gateway without descriptors (47, 49 to 52)."""

import contextlib
import resource
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from tandem_engine.base.linux import die_with_parent
from tandem_services.cli.flags import bundled_model
from tandem_testing.chaos.fleet import START_TIMEOUT_S
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.waiting import until

DESCRIPTORS = 96
HOUR_S = 3600


@scenario(47)
async def the_wall_clock_jumps(run: Run) -> None:
    """That of the worker services; Redis keeps its own."""
    starts = [part.starts for part in run.fleet.parts()]
    clock = run.fleet.clock_file

    async def fault(load: Load) -> None:
        clock.write_text(str(HOUR_S), "utf-8")
        load.send(run.asks(Kind.PLAIN, count=6, tokens=32, first=410))
        await until(lambda: load.begun >= len(load.answers), PATIENCE_S, "all speak")
        clock.write_text(str(-HOUR_S), "utf-8")

    try:
        await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault)
        await run.works()
    finally:
        clock.unlink(missing_ok=True)
    run.expect([part.starts for part in run.fleet.parts()] == starts, "a process ended because of the clock")


@scenario(49)
async def a_gateway_has_no_descriptors_left(run: Run) -> None:
    def few() -> None:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    gateway = run.fleet.add_gateway("gateway-poor", before_exec=few)
    try:
        await until(lambda: run.fleet.is_ready(gateway.url), START_TIMEOUT_S, "it is ready", gateway.part.log_text)
        address = urlsplit(gateway.url)
        crowd = []
        for _ in range(2 * DESCRIPTORS):
            client = socket.socket()
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect((address.hostname, address.port))
            crowd.append(client)
        await run.works(gateways=len(run.fleet.gateways) - 1)
        for client in crowd:
            client.close()
        await until(lambda: run.fleet.is_ready(gateway.url), PATIENCE_S, "it answers again", gateway.part.log_text)
        async with run.load() as load:
            load.urls = [gateway.url]
            load.send(run.asks(Kind.GREEDY, count=4, tokens=16))
            await run.judge(await load.gathered())
        run.expect(gateway.part.starts == 1, "the gateway died")
    finally:
        run.fleet.remove_gateway(gateway)


@scenario(50)
async def two_workers_have_one_name(run: Run) -> None:
    older = run.fleet.of_role("decode")[0]
    starts, log_size = older.part.starts, older.part.log_size()
    newer = await run.fleet.add_worker(older.id, "decode", kept=False)
    try:
        async with run.load() as load:
            count = 0
            while older.part.starts == starts:
                load.send(run.asks(Kind.GREEDY, Kind.SEEDED, count=4, tokens=64, first=count))
                count += 4
                await load.gathered()
                run.expect(newer.part.alive, "the newer one ended first")
                if not newer.part.alive:
                    break
            await run.judge(await load.gathered())
        run.expect("is fenced" in older.part.log_text(log_size), "the older one was not notified that it is fenced")
        # The keeper has started the older one again: now it is the newest.
        await until(lambda: not newer.part.alive, READY_TIMEOUT_S, "the newer one is fenced in its turn")
    finally:
        await run.fleet.remove_worker(newer)


@contextlib.asynccontextmanager
async def foreign_worker(run: Run, **settings: object) -> AsyncIterator[Worker]:
    """A further decode worker that differs from the others, ready."""
    worker = await run.fleet.add_worker("odd-0", "decode", kept=False, **settings)
    try:
        await until(
            lambda: run.fleet.is_ready(worker.url), START_TIMEOUT_S, "the odd one is ready", worker.part.log_text
        )
        yield worker
    finally:
        await run.fleet.remove_worker(worker)


async def never_paired(run: Run) -> None:
    """All answers are right, and no attempt had a prefill worker and the odd decode worker."""
    async with run.load() as load:
        for number in range(4):
            load.send(run.asks(Kind.GREEDY, Kind.SEEDED, tokens=48, prompt_words=120, count=8, first=30 * number))
            await load.gathered()
        answers = await load.gathered()
    await run.judge(answers)
    attempts = [attempt for answer in answers for attempt in await run.attempts(answer)]
    odd = [attempt for attempt in attempts if str(attempt["decode"]).startswith("odd-")]
    run.notes.append(f"{len(odd)} of {len(attempts)} attempts went to the odd worker")
    run.expect(not any(attempt["prefill"] for attempt in odd), "the odd worker was paired")


@scenario(51)
async def a_decode_worker_has_another_page_layout(run: Run) -> None:
    flags = (*run.fleet.workers[0].settings.engine_flags, "--page-size", "32")
    async with foreign_worker(run, engine_flags=flags):
        await never_paired(run)


@scenario(52)
async def a_decode_worker_has_other_weights(run: Run) -> None:
    async with foreign_worker(run, model=str(other_weights(run.fleet.folder / f"other-{run.salt}"))):
        await never_paired(run)


def other_weights(folder: Path) -> Path:
    """The bundled model with some bytes of its last tensor changed."""
    shutil.copytree(bundled_model(), folder)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    for place in range(len(data) - 40_000, len(data), 2):
        data[place] ^= 0x15
    shard.write_bytes(data)
    return folder
