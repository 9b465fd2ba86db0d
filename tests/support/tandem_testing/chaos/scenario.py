"""What a scenario is given, and what it leaves behind.

    @scenario(1, quick=True)
    async def a_decode_worker_dies(run: Run) -> None:
        ...                              # `run` sends load, compares answers, and keeps the account

A scenario breaks things and says what must hold. It raises nothing for a broken promise: `run.expect` notes it,
so that one report tells everything that went wrong.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tandem_testing.chaos.catalogue import Promise, promise
from tandem_testing.chaos.compare import Damage, compare_answers
from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.machine import Slowness, Worst
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.streams import Answer, Ask, Kind, Load, asks
from tandem_testing.metric_text import metric_sum
from tandem_testing.waiting import until

PATIENCE_S = 120.0
"""For what is no promise: a machine on which it takes longer hangs."""
SPEAK_TIMEOUT_S = PATIENCE_S
SETTLE_TIMEOUT_S = 120.0
LINK_TEST_S = 30.0
READY_TIMEOUT_S = 180.0
FAULT_TIMEOUT_S = 120.0
"""Of one round of requests that are to meet a fault."""
MAX_ROUNDS = 6
SHOWN_PROBLEMS = 6
AT_ONCE = 64
"""Requests to the one worker of the reference: more would wait longer for it than its queue lets them."""
ENOUGH = 8
"""Streams that are inspected to find the worker with most of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much load."""

    streams: int = 64
    tokens: int = 256
    prompt_words: int = 60
    random_faults_s: float = 60.0
    """Scenario 56."""
    exceptions: int = 60
    """Scenarios 72 and 73, each."""


@dataclass(kw_only=True, slots=True)
class Reference:
    """One worker that nothing happens to. Each distinct ask is answered once; its answer is the right one."""

    fleet: Fleet
    _answers: dict[Ask, Answer] = field(default_factory=dict)

    async def answers(self, wanted: Sequence[Ask]) -> list[Answer]:
        bare = [ask.unsalted for ask in wanted]
        missing = [ask for ask in dict.fromkeys(bare) if ask not in self._answers]
        for start in range(0, len(missing), AT_ONCE):
            await self._ask(missing[start : start + AT_ONCE])
        return [self._answers[ask] for ask in bare]

    async def _ask(self, missing: Sequence[Ask]) -> None:
        async with Load(urls=[gateway.url for gateway in self.fleet.gateways], model=self.fleet.model) as load:
            load.send(missing)
            for answer in await load.gathered():
                assert answer.error is None, f"the reference failed: {answer.error}"
                self._answers[answer.ask] = answer


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of one scenario."""

    fleet: Fleet
    reference: Reference
    scale: Scale
    slowness: Slowness
    salt: str
    """Keeps this run's prompts out of every prefix cache."""
    random: random.Random
    """What a scenario draws where all variations take too long: by the seed of the suite and the run's number."""
    beside: Worst = field(default_factory=Worst)
    """How slow the machine was so far while the scenario ran."""
    damage: Damage = field(default_factory=Damage)
    stalls: list[float] = field(default_factory=list)
    """The longest silence after the fault, of each stream."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """The same of streams of one kind, by what they are called in the report."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    requests: int = 0
    _slowest: tuple[float, Answer] | None = None
    _beside_slowest: Sequence[Answer] = ()
    """All answers that were judged with the slowest one."""
    _fresh: int = 0

    @staticmethod
    def now() -> float:
        """The clock that answers carry their times in."""
        return time.monotonic()

    def allowed(self, bound_s: float) -> float:
        """Seconds that what is promised within `bound_s` may take on this machine, as it was until now."""
        return replace(self.slowness, during=self.beside.contention).allowed(bound_s)

    def expect(self, kept: object, sentence: str) -> None:
        """`sentence` tells what is wrong when `kept` is false."""
        if not kept and len(self.problems) < SHOWN_PROBLEMS:
            self.problems.append(sentence)

    def asks(self, *kinds: Kind, count: int = 0, tokens: int = 0, prompt_words: int = 0, first: int = 0) -> list[Ask]:
        """Asks of this run; sizes default to the scale's."""
        return asks(
            *(kinds or (Kind.GREEDY,)),
            count=count or self.scale.streams,
            prompt_words=prompt_words or self.scale.prompt_words,
            max_tokens=tokens or self.scale.tokens,
            salt=self.salt,
            first=first,
        )

    def fresh(self, wanted: Sequence[Ask]) -> list[Ask]:
        """The same asks, cached nowhere; the reference need not answer them again."""
        self._fresh += 1
        return [replace(ask, salt=f"{self.salt}-{self._fresh}") for ask in wanted]

    def load(self, gateways: int | None = None) -> Load:
        """Clients of the first `gateways` gateways, or of all."""
        return Load(urls=[gateway.url for gateway in self.fleet.gateways[:gateways]], model=self.fleet.model)

    async def under_fault(
        self, wanted: Sequence[Ask], fault: Callable[[Load], Awaitable[None]], *, speaking: int = 2
    ) -> list[Answer]:
        """Send all of `wanted`; `fault` happens once `speaking` streams speak; then judge every answer."""
        async with self.load() as load:
            load.send(wanted)
            await until(lambda: load.speaking >= speaking, SPEAK_TIMEOUT_S, f"{speaking} streams speak")
            started = self.now()
            await fault(load)
            self.expect(not load.finished, "the fault came too late: every stream had ended")
            answers = await load.gathered()
        await self.judge(answers, after=started)
        return answers

    async def until_it_happens(
        self, load: Load, wanted: Sequence[Ask], happened: Callable[[], bool], what: str
    ) -> None:
        """Send `wanted` until the fault `what` has happened to one of them. On a busy machine the router may keep a
        whole round of requests away from the workers concerned; then another one follows, up to `MAX_ROUNDS`."""
        for _ in range(MAX_ROUNDS):
            load.send(self.fresh(wanted))
            await until(lambda: happened() or load.finished, FAULT_TIMEOUT_S, what)
            if happened():
                return
        self.expect(False, f"the fault never happened: {what}")

    async def judge(self, answers: Sequence[Answer], *, after: float | None = None) -> None:
        """Compare with the reference; silences count from `after` on, if it is given."""
        expected = await self.reference.answers([answer.ask for answer in answers])
        self.requests += len(answers)
        for right, mine in zip(expected, answers, strict=True):
            damage = compare_answers(right, mine)
            self.damage += damage
            if damage:
                self.expect(False, f"{mine.ask.kind.value} stream {mine.id or '?'}: {mine.error or damage}")
        if after is None:
            return
        for answer in answers:
            stall = answer.longest_silence(after)
            self.stalls.append(stall)
            if self._slowest is None or stall > self._slowest[0]:
                self._slowest, self._beside_slowest = (stall, answer), answers

    async def unhurt(self) -> float:
        """The longest silence when the load in which the slowest stream was comes again, as it came, without a fault:
        what this machine reaches now."""
        if not self._beside_slowest:
            return 0.0
        async with self.load() as load:
            began, first = self.now(), min(answer.began for answer in self._beside_slowest)
            for answer in sorted(self._beside_slowest, key=lambda answer: answer.began):
                await asyncio.sleep(began + answer.began - first - self.now())
                load.send(self.fresh([answer.ask]))
            answers = await load.gathered()
        await self.judge(answers)
        return max(answer.longest_silence(began) for answer in answers)

    async def works(self, count: int = 4, *, gateways: int | None = None, first: int = 500) -> list[Answer]:
        """A few more requests, which must be clean: whatever happened, it still serves."""
        async with self.load(gateways) as load:
            load.send(self.asks(Kind.PLAIN, count=count, tokens=16, first=first))
            answers = await load.gathered()
        await self.judge(answers)
        return answers

    async def attempts(self, answer: Answer) -> list[dict[str, Any]]:
        """All attempts at a request, as its gateway explains them; none if it does not."""
        response = await self.fleet.http.get(f"{answer.gateway}/v1/requests/{answer.id}/explain")
        if response.status_code != 200:
            return []
        return [attempt for choice in response.json()["choices"] for attempt in choice["attempts"]]

    async def busiest_decode(self, load: Load) -> Worker:
        """The decode worker that generates most of the youngest streams of `load`, as their gateways know it now: what
        workers report of themselves is half a second old, which is as long as a short stream lasts."""
        youngest = sorted(load.under_way, key=lambda answer: len(answer.received_at))[:ENOUGH]
        streams = await asyncio.gather(*(self.attempts(answer) for answer in youngest))
        homes = Counter(str(attempts[-1]["decode"]).partition("@")[0] for attempts in streams if attempts)
        return max(self.fleet.of_role("decode"), key=lambda worker: homes[worker.id])

    async def sample(
        self, name: str, answers: Sequence[Answer], *, after: float, of: Callable[[set[str]], bool]
    ) -> None:
        """Keep the longest silences after `after` of those `answers` whose attempts had outcomes as in `of`."""
        stories = await asyncio.gather(*(self.attempts(answer) for answer in answers))
        self.samples.setdefault(name, []).extend(
            answer.longest_silence(after)
            for answer, attempts in zip(answers, stories, strict=True)
            if of({str(attempt["outcome"]) for attempt in attempts})
        )

    async def explain_slowest(self) -> None:
        """Note what the stream with the longest silence went through."""
        if self._slowest is None:
            return
        stall, answer = self._slowest
        story = [
            f"{attempt['prefill'] or 'alone'} > {attempt['decode']} after {attempt['resumed_tokens']} "
            f"({attempt['source']}): {attempt['outcome']}"
            for attempt in await self.attempts(answer)
        ]
        began = f"{len(answer.received_at)} pieces received"
        self.notes.append(f"slowest, {stall:.2f} s, {answer.ask.kind.value} {answer.id} ({began}): {'; '.join(story)}")

    async def lost_attempts(self) -> float:
        """Attempts so far that neither ended by themselves nor were stopped by their client."""
        return await lost_attempts(self.fleet)

    async def settled(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until every engine is idle and empty its cache: every page must be free then."""
        for worker in self.fleet.workers:
            leaked, problems = await leaked_pages(self.fleet, worker, timeout_s)
            self.damage += Damage(leaked=leaked)
            self.expect(leaked == 0, f"{worker.id} leaked {leaked} pages")
            self.expect(not problems, f"{worker.id}: {problems}")


async def lost_attempts(fleet: Fleet) -> float:
    """See `Run.lost_attempts`."""
    # One reading of each gateway: attempts that finish between two readings are not lost.
    return sum([_lost_attempts(await fleet.metrics(gateway.url)) for gateway in fleet.gateways])


def _lost_attempts(metrics: str) -> float:
    name = "tandem_gateway_attempts_total"
    ended = [metric_sum(metrics, f'{name}{{outcome="{outcome}"}}') for outcome in ("finished", "stopped")]
    return metric_sum(metrics, name) - sum(ended)


async def leaked_pages(fleet: Fleet, worker: Worker, timeout_s: float) -> tuple[int, list[str]]:
    """Pages that are not free though unused, and the problems of the engine's audit."""
    report: dict[str, object] = {}

    async def empty() -> bool:
        report.update(await fleet.audit(worker) or {"idle": False})
        return bool(report["idle"]) and report["private_pages"] == report["held_pages"] == 0

    try:
        await until(empty, timeout_s, f"{worker.id} idle", report.copy)
    except AssertionError as error:
        return int(str(report.get("private_pages", 0))) + int(str(report.get("held_pages", 0))), [str(error)]
    await fleet.http.post(f"{worker.url}/flush_cache", json={})
    dummy = 1
    total = await fleet.metric(worker.url, "tandem_worker_kv_pages")
    after: dict[str, object] = {}

    def leaked() -> int:
        return int(total) - dummy - int(str(after.get("free_pages", 0)))

    async def free() -> bool:
        after.update(await fleet.audit(worker) or {})
        return leaked() == 0

    # The test of a link to a worker that has just joined has pages for a moment.
    with contextlib.suppress(AssertionError):
        await until(free, LINK_TEST_S, f"all pages of {worker.id} free")
    problems = after.get("problems", ["no audit"])
    return leaked(), [str(problem) for problem in problems] if isinstance(problems, list) else [str(problems)]


Body = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A promise and the test of it."""

    promise: Promise
    body: Body
    shape: Shape
    quick: bool
    timeout_s: float
    why_not: Callable[[], str]
    """Why this machine cannot run it; "" when it can."""


class Result(Enum):
    KEPT = "kept"
    BROKEN = "BROKEN"
    ABSENT = "absent"


STANDARD = Shape()


def scenario(
    number: int,
    *,
    shape: Shape = STANDARD,
    quick: bool = False,
    timeout_s: float = 900.0,
    why_not: Callable[[], str] = str,
) -> Callable[[Body], Scenario]:
    """Make a coroutine function the test of a promise. Families hold scenarios; `suite` collects them."""

    def attach(body: Body) -> Scenario:
        return Scenario(
            promise=promise(number), body=body, shape=shape, quick=quick, timeout_s=timeout_s, why_not=why_not
        )

    return attach
