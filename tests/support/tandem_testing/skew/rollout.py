"""A rollout from one release to another and back, in stages that mix the two in every way, under load.

Each stage sends the same requests, with prefixes that no cache has, and compares each answer token by token with that
of the old release alone. A stage that changes a member does so while most streams speak, and sends them again after it.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem_testing.chaos.compare import Damage, compare_answers
from tandem_testing.chaos.streams import Answer, Ask, Kind, Load, asks
from tandem_testing.skew.fleet import MODEL, Counts, MixedFleet
from tandem_testing.skew.releases import Release
from tandem_testing.waiting import until

SPEAK_TIMEOUT_S = 60.0
REQUESTS = asks(Kind.GREEDY, Kind.SEEDED, Kind.CHOICES, Kind.SCHEMA, count=12, prompt_words=150, max_tokens=64)
"""Of one stage. Every prompt is long enough for two workers."""
Change = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What a stage has measured."""

    stage: str
    served: int
    equal: int
    failed: int
    handed_over: int
    """KV that workers of the end of the stage have received from others."""
    moved: int
    recomputed: int
    problems: tuple[str, ...]
    """Of the first requests that were not equal."""

    @property
    def sound(self) -> bool:
        """No request failed, and none differs."""
        return not self.failed and self.equal == self.served


@dataclass(kw_only=True, slots=True)
class Rollout:
    """Of `old` to `new`, one stage after the other."""

    fleet: MixedFleet
    old: Release
    new: Release
    _expected: dict[Ask, Answer] = field(default_factory=dict)
    _stages: int = 0

    async def stages(self) -> AsyncGenerator[StageResult]:
        """The order of docs/upgrade-rollback.md: prefill and decode workers, then gateways; and a way back."""
        fleet, old, new = self.fleet, self.old, self.new
        fleet.add_gateway(old)
        for role in ("prefill", "decode", "decode"):
            fleet.add_worker(old, role)
        await fleet.ready()
        yield await self._stage("old release alone")
        fleet.add_gateway(new)
        await fleet.ready()
        yield await self._stage("two gateways, old workers")
        fleet.add_worker(new, "prefill")
        await fleet.ready()
        yield await self._stage("old prefill drains, a new one", self._retired("prefill"))
        yield await self._stage("old decode killed", self._killed("decode"))
        fleet.add_worker(new, "decode")
        await fleet.ready()
        yield await self._stage("old and new decode")
        yield await self._stage("last old decode drains", self._retired("decode"))
        fleet.add_worker(new, "decode")
        await fleet.ready()
        yield await self._stage("two gateways, new workers")
        fleet.add_worker(old, "prefill")
        await fleet.ready()
        yield await self._stage("prefill rolled back", self._retired("prefill"))
        yield await self._stage("new decode killed, old prefill", self._killed("decode"))
        for role in ("prefill", "decode"):
            fleet.add_worker(new, role)
        await fleet.ready()
        yield await self._stage("new prefill again", self._retired("prefill"))
        await fleet.retire(fleet.of("gateway")[0])
        yield await self._stage("new release alone")

    def _retired(self, role: str) -> Change:
        async def change() -> None:
            await self.fleet.retire(self.fleet.of(role)[0])

        return change

    def _killed(self, role: str) -> Change:
        async def change() -> None:
            await self.fleet.lose(self.fleet.of(role)[0])

        return change

    async def _stage(self, name: str, change: Change | None = None) -> StageResult:
        self._stages += 1
        before = await self.fleet.counts()
        salted = [replace(ask, salt=f"skew-{self._stages}") for ask in REQUESTS]
        async with Load(urls=[each.url for each in self.fleet.of("gateway")], model=MODEL) as load:
            load.send(salted)
            if change is not None:
                speaking = len(salted) - 4
                await until(lambda: load.begun >= speaking or load.finished, SPEAK_TIMEOUT_S, "streams speak")
                assert load.speaking, f"all streams ended before the change of {name!r}"
                await change()
            answers = await load.gathered()
            if change is not None:
                answers += await self._after(load)
        return self._judged(name, answers, before, await self.fleet.counts())

    async def _after(self, load: Load) -> list[Answer]:
        """The same requests once the change is over."""
        load.send([replace(ask, salt=f"skew-{self._stages}-after") for ask in REQUESTS])
        return (await load.gathered())[len(REQUESTS) :]

    def _judged(self, name: str, answers: list[Answer], before: Counts, after: Counts) -> StageResult:
        if not self._expected:
            self._expected = {answer.ask.unsalted: answer for answer in answers if answer.error is None}
        damages = [self._damage(answer) for answer in answers]
        transfers = (value - before.transfers.get(url, 0.0) for url, value in after.transfers.items())
        return StageResult(
            stage=name,
            served=len(answers),
            equal=sum(not damage for damage in damages),
            failed=sum(damage.failed for damage in damages),
            handed_over=round(sum(transfers)),
            moved=round(after.moved - before.moved),
            recomputed=round(after.lost - before.lost + after.alone - before.alone),
            problems=tuple(
                f"{answer.ask.kind.value}: {answer.error or damage}"
                for answer, damage in zip(answers, damages, strict=True)
                if damage
            )[:3],
        )

    def _damage(self, answer: Answer) -> Damage:
        expected = self._expected.get(answer.ask.unsalted)
        return Damage(failed=1) if expected is None else compare_answers(expected, answer)


async def run_rollout(old: Release, new: Release, folder: Path) -> AsyncGenerator[StageResult]:
    """All stages in a fleet that is started for them; its logs stay in `folder`."""
    async with MixedFleet.running(folder) as fleet:
        async for result in Rollout(fleet=fleet, old=old, new=new).stages():
            yield result
