"""Runs scenarios one after the other and judges them.

    1. fleet      of the scenario's shape; the last one is used again when it is healthy and has that shape
    2. measure    how slow the machine is now (`machine`)
    3. scenario   within its time limit
    4. calm       knobs back, processes thawed, Redis back, proxies calm, addresses back; every process ready
    5. settle     every page free again, every audit clean
    6. again      where a recovery is late: the same load without a fault, and how slow the machine is now
    7. judge      kept, or broken with every reason; a fleet that was not well afterwards is replaced

The reference, one worker alone, runs beside all fleets and is never hurt.
"""

import asyncio
import contextlib
import random
import shutil
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from tandem_engine.base.addresses import LOOPBACK
from tandem_testing.chaos import machine
from tandem_testing.chaos.catalogue import Promise
from tandem_testing.chaos.compare import Damage
from tandem_testing.chaos.fleet import START_TIMEOUT_S, Fleet, Shape
from tandem_testing.chaos.scenario import READY_TIMEOUT_S, Reference, Result, Run, Scale, Scenario
from tandem_testing.tcp_proxy import CALM

REFERENCE = Shape(prefill=0, decode=0, both=1, gateways=1, engine_flags=("--allow-runtime-lora-updating",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one promise."""

    promise: Promise
    result: Result
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    damage: Damage = field(default_factory=Damage)
    stalls: tuple[float, ...] = ()
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Silences of streams of one kind, by its name."""
    requests: int = 0
    allowed_s: float | None = None
    """The bound as stretched for this machine."""
    seconds: float = 0.0

    @property
    def recovery_s(self) -> float | None:
        """The longest stall of any stream."""
        return max(self.stalls) if self.stalls else None


Progress = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class Runner:
    """Use as `async with`; belongs to one event loop."""

    folder: Path
    scale: Scale
    progress: Progress = lambda _: None
    host: str = LOOPBACK
    """Loopback address of fleets that are not wired."""
    checkpoint: Path | None = None
    """What the fleets serve; None is the bundled model."""
    quiet_s: float = 0.0
    """Longest silence without a fault, learned from scenario 0."""
    slack_s: float = 0.0
    """For a machine that stands still at times: added to every bound."""
    seed: int = 0
    """Of what scenarios draw."""
    _fleets: int = 0
    _runs: int = 0
    _current: Fleet | None = None
    _reference: Reference | None = None
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _always: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def __aenter__(self) -> Self:
        self.progress("starting the reference")
        alone = Fleet.running(new_folder(self.folder / "reference"), REFERENCE, self.host, checkpoint=self.checkpoint)
        self._reference = Reference(fleet=await self._always.enter_async_context(alone))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop_fleet()
        await self._always.aclose()

    async def run(self, scenario: Scenario) -> Outcome:
        """Run it and judge it. Raises nothing for what the scenario finds."""
        assert self._reference is not None, "use the runner as `async with`"
        began = time.monotonic()
        self.progress("starting a fleet" if self._current is None else "waiting for the fleet")
        fleet = await self._fleet_of(scenario.shape)
        self._runs += 1
        run = Run(
            fleet=fleet,
            reference=self._reference,
            scale=self.scale,
            slowness=await self._measure(scenario.shape),
            salt=f"chaos-{self._runs}",
            random=random.Random(f"{self.seed} {self._runs} {scenario.promise.number}"),
        )
        self.progress("running")
        async with machine.beside(run.beside):
            healthy = await self._guarded(scenario.body(run), scenario.timeout_s, run)
        bound = scenario.promise.bound_s
        if bound is not None and max(run.stalls, default=0.0) > bound:
            await run.explain_slowest()
        self.progress("recovering")
        healthy &= await self._guarded(self._calm(fleet), READY_TIMEOUT_S, run)
        if healthy:
            self.progress("counting pages")
            healthy = await self._guarded(run.settled(), READY_TIMEOUT_S, run)
        if healthy and bound is not None and max(run.stalls, default=0.0) > run.allowed(bound):
            self.progress("the same load without a fault")
            run.slowness = machine.worse(run.slowness, await self._measure(scenario.shape))
            healthy = await self._guarded(self._unhurt(run), READY_TIMEOUT_S, run)
        outcome = self._judge(scenario, run, time.monotonic() - began)
        if not healthy or run.damage.leaked:
            await self._drop_fleet()
        return outcome

    async def _unhurt(self, run: Run) -> None:
        reached = await run.unhurt()
        run.notes.append(f"without a fault the longest silence of the same load is {reached:.2f} s")
        run.slowness = replace(run.slowness, quiet_s=max(run.slowness.quiet_s, reached + self.slack_s))
        await run.settled()

    async def _measure(self, shape: Shape) -> machine.Slowness:
        return await machine.measure(shape.workers, self.quiet_s + self.slack_s)

    async def _guarded(self, work: Awaitable[None], limit: float, run: Run) -> bool:
        """Whether `work` came to its end; an error of it is a broken promise in the report."""
        try:
            async with asyncio.timeout(limit):
                await work
        except TimeoutError:
            run.expect(False, f"not over after {limit:g} s: something hangs")
        except Exception as error:  # noqa: BLE001  # the boundary of a scenario: the others still run
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            run.expect(False, f"{type(error).__name__}: {str(error)[:400]} ({where})")
        else:
            return True
        return False

    async def _fleet_of(self, shape: Shape) -> Fleet:
        if self._current is None or self._current.shape != shape:
            await self._drop_fleet()
            self._fleets += 1
            folder = new_folder(self.folder / f"fleet-{self._fleets}")
            fleet = Fleet.running(folder, shape, self.host, checkpoint=self.checkpoint)
            self._current = await self._stack.enter_async_context(fleet)
        return self._current

    async def _drop_fleet(self) -> None:
        self._current = None
        await self._stack.aclose()

    async def _calm(self, fleet: Fleet) -> None:
        fleet.redis.resume()
        for worker in fleet.workers:
            worker.knobs.turn()
            worker.thaw()
            if worker.place is not None:
                worker.place.plug()
            for line in (worker.request_line, worker.peer_line):
                if line is not None:
                    line.weather = CALM
        for line in fleet.redis_lines.values():
            line.weather = CALM
        await fleet.all_ready(START_TIMEOUT_S)

    def _judge(self, scenario: Scenario, run: Run, seconds: float) -> Outcome:
        bound = scenario.promise.bound_s
        allowed = None if bound is None else run.allowed(bound)
        longest = max(run.stalls, default=0.0)
        if scenario.promise.number == 0:
            self.quiet_s = longest
        if allowed is not None:
            run.expect(
                longest <= allowed,
                f"a stream was silent for {longest:.1f} s; {bound:g} s are promised, {allowed:.1f} s allowed here",
            )
        return Outcome(
            promise=scenario.promise,
            result=Result.BROKEN if run.problems or run.damage else Result.KEPT,
            problems=tuple(run.problems),
            notes=tuple(run.notes),
            damage=run.damage,
            stalls=tuple(run.stalls),
            samples={name: tuple(silences) for name, silences in run.samples.items()},
            requests=run.requests,
            allowed_s=allowed,
            seconds=seconds,
        )


def new_folder(path: Path) -> Path:
    """Made, absolute, without what an earlier run has left."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path.resolve()
