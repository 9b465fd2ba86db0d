"""Random faults for as long as wanted (56)."""

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tandem_testing.chaos.families.freezes import FROZEN_S
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Answer, Ask, Kind

EVERY_S = 10.0
CLIENTS = 8


@dataclass(kw_only=True, slots=True)
class Havoc:
    """Commits one random fault after the other, and leaves a healthy replica of each role alone."""

    run: Run
    random: random.Random
    committed: list[str] = field(default_factory=list)
    _frozen: dict[str, int] = field(default_factory=dict)
    """Worker that was frozen → its number of starts then. Thawed, that process says that it is ready until it learns
    that it was fenced; it serves no request."""
    _thawing: "set[asyncio.Task[None]]" = field(default_factory=set)

    async def commit(self) -> None:
        faults: list[Callable[[], Awaitable[str | None]]] = [
            self.kill_decode,
            self.kill_prefill,
            self.kill_during_transfer,
            self.freeze_decode,
            self.restart_redis,
            self.leave,
            self.drain,
        ]
        name = await self.random.choice(faults)()
        self.committed.append(name or "spared: no second worker was ready")

    async def kill_decode(self) -> str | None:
        return await self._hurt("decode", "kill decode", Worker.kill)

    async def kill_prefill(self) -> str | None:
        return await self._hurt("prefill", "kill prefill", Worker.kill)

    async def kill_during_transfer(self) -> str | None:
        def arm(worker: Worker) -> None:
            worker.knobs.turn(die_at="push")
            self._later(EVERY_S / 2, worker.knobs.turn)

        return await self._hurt("prefill", "kill prefill during a transfer", arm)

    async def freeze_decode(self) -> str | None:
        def freeze(worker: Worker) -> None:
            worker.freeze()
            self._frozen[worker.id] = worker.part.starts
            self._later(FROZEN_S, worker.thaw)

        return await self._hurt("decode", "freeze decode", freeze)

    async def restart_redis(self) -> str | None:
        self.run.fleet.redis.kill()
        await asyncio.sleep(1.0)
        self.run.fleet.redis.restart()
        return "restart Redis"

    async def leave(self) -> str | None:
        async with self.run.load() as crowd:
            crowd.send(self.run.asks(Kind.PLAIN, count=6, tokens=100, first=self.random.randrange(1000)))
            await asyncio.sleep(self.random.uniform(0.1, 1.5))
        return "clients leave"

    async def drain(self) -> str | None:
        return await self._hurt("decode", "drain decode", lambda worker: worker.part.send(signal.SIGTERM))

    async def finish(self) -> None:
        await asyncio.gather(*self._thawing)

    async def _hurt(self, role: str, name: str, how: Callable[[Worker], None]) -> str | None:
        """Only where another worker of the role is ready: the promise is for while one lives."""
        workers = self.run.fleet.of_role(role)
        answers = await asyncio.gather(*(self.run.fleet.is_ready(worker.url) for worker in workers))
        pairs = zip(workers, answers, strict=True)
        serving = [worker for worker, ready in pairs if ready and self._frozen.get(worker.id) != worker.part.starts]
        if len(serving) < 2:
            return None
        how(self.random.choice(serving))
        return name

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                act()

        self._thawing.add(asyncio.create_task(wait()))


@scenario(56, timeout_s=2 * 3600.0)
async def random_faults(run: Run) -> None:
    havoc = Havoc(run=run, random=run.random)
    ends = run.now() + run.scale.random_faults_s
    answers: list[Answer] = []

    async def client(number: int) -> None:
        kinds = [Kind.GREEDY, Kind.SEEDED, Kind.PLAIN, Kind.SCHEMA]
        turn = 0
        while run.now() < ends:
            async with run.load() as load:
                load.urls = [*load.urls[number % 2 :], *load.urls[: number % 2]]
                load.send(one(run, kinds[(number + turn) % len(kinds)], number, turn))
                answers.extend(await load.gathered())
            turn += 1

    async def faults() -> None:
        while run.now() + EVERY_S < ends:
            await asyncio.sleep(EVERY_S)
            await havoc.commit()

    began = run.now()
    await asyncio.gather(faults(), *(client(number) for number in range(CLIENTS)))
    await havoc.finish()
    await run.fleet.all_ready(READY_TIMEOUT_S)
    await run.judge(answers, after=began)
    run.expect(any(not name.startswith("spared") for name in havoc.committed), "nothing happened")
    run.notes.append("; ".join(havoc.committed))


def one(run: Run, kind: Kind, number: int, turn: int) -> list[Ask]:
    """The next ask of a client; few enough different ones that the reference stays quick."""
    return run.asks(kind, count=1, first=1000 + 10 * number + turn % 4)
