"""One run: the stages of a plan one after the other, each with its share of the time, results written as they come.

An engine that fails is left out of its stage, a stage that fails or has no time left is noted, and the others continue.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from peers.checkpoints import checkpoint_of
from peers.engines.base import ROOT, Engine, Setting
from peers.engines.registry import INSTALLATION, open_engine
from peers.install.peers import NOT_HERE, VERSIONS
from peers.install.steps import CONSOLE
from peers.machine import description
from peers.plan import Plan, kv_bytes
from peers.processes import PeerError
from peers.results import CUT, Results, StageReport, write
from peers.time_limit import Deadline, TimeLimit

START_ATTEMPTS = 2
"""After so many starts that failed an engine is not tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of a run that is complete or done again."""

    name: str
    weight_s: float
    """Seconds that it takes on two idle cores, roughly: its share of the time."""
    run: "Callable[[Session], None]"


@dataclass(kw_only=True)
class Session:
    """Runs stages; `results` has what is known so far, and so has the file at `out`."""

    plan: Plan
    home: Path
    results: Results
    out: Path
    stage: str = ""
    """The present one."""
    deadline: Deadline = field(default_factory=lambda: Deadline(at=0.0, answer_s=0.0))
    """Of the present stage."""
    _notes: list[str] = field(default_factory=list)
    _failed_starts: dict[str, int] = field(default_factory=dict)

    def run(self, stages: Sequence[Stage], limit: TimeLimit) -> None:
        """Those that `results` has not complete."""
        known = {report.name for report in self.results.stages}
        waiting = [stage for stage in stages if stage.name not in known]
        began, before = time.monotonic(), self.results.minutes
        for place, stage in enumerate(waiting):
            later = sum(each.weight_s for each in waiting[place + 1 :])
            self.deadline = limit.stage(stage.weight_s, later)
            about = f"{place + 1} of {len(waiting)}, at most {_minutes(self.deadline.left)}"
            CONSOLE.print(f"[bold]{stage.name}[/] ({about}; {_minutes(limit.ends - limit.clock())} left in all)")
            try:
                self._run(stage)
            finally:
                self.results.minutes = round(before + (time.monotonic() - began) / 60, 1)
                self.keep()

    def _run(self, stage: Stage) -> None:
        self.stage, self._notes = stage.name, []
        began, allotted = time.monotonic(), self.deadline.left
        ending = f"{CUT}interrupted"
        try:
            if self.deadline.passed:
                self.cut("no time was left for it")
            else:
                stage.run(self)
            ending = ""
        except PeerError as error:
            ending = ""
            self.note(f"{stage.name}: {_first_line(error)}", f"{stage.name} failed: {error}")
        finally:
            seconds = time.monotonic() - began
            notes = [*self._notes, *([ending] if ending else [])]
            self.results.stages.append(
                StageReport(name=stage.name, seconds=round(seconds, 1), allotted_s=round(allotted, 1), notes=notes)
            )
        CONSOLE.print(f"  took {_minutes(seconds)}")

    def keep(self) -> None:
        """Write what is known."""
        write(self.results, self.out)

    def note(self, text: str, shown: str = "") -> None:
        """The stage is not complete: why."""
        self._notes.append(text)
        CONSOLE.print(f"  [yellow]{shown or text}[/]")

    def cut(self, what: str) -> None:
        self.note(f"{CUT}{what}")

    def failed(self, engine: str, error: PeerError) -> None:
        """An engine cannot continue in this stage."""
        self.note(f"{engine}: {_first_line(error)}", f"{engine} is left out: {error}")

    def log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def setting(self, model: str, dtype: str, streams: int) -> Setting:
        return Setting(
            checkpoint=checkpoint_of(self.home, model, dtype),
            dtype=dtype,
            threads=self.plan.threads,
            kv_gib=round(kv_bytes(model, dtype, streams) / (1 << 30), 3),
            home=self.home,
            logs=self.home / "logs" / f"{model}-{dtype}",
            streams=streams,
            deadline=self.deadline,
        )

    @contextmanager
    def opened(self, names: Sequence[str], setting: Setting) -> Iterator[list[Engine]]:
        """Those that start; each is paused once it is ready."""
        with ExitStack() as stack:
            engines = []
            for name in names:
                engine = None if INSTALLATION.get(name) in self.results.missing else self._start(name, setting)
                if engine is not None:
                    stack.callback(engine.close)
                    engine.pause()
                    engines.append(engine)
            yield engines

    def _start(self, name: str, setting: Setting) -> Engine | None:
        if self._failed_starts.get(name, 0) >= START_ATTEMPTS:
            self.note(f"{name}: not tried again after {START_ATTEMPTS} starts that failed")
            return None
        try:
            with CONSOLE.status(f"starting {name}"):
                return open_engine(name, setting)
        except PeerError as error:
            self._failed_starts[name] = self._failed_starts.get(name, 0) + 1
            self.failed(name, error)
            return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].removesuffix(":")


def _minutes(seconds: float) -> str:
    return f"{max(0, round(seconds)) // 60}:{max(0, round(seconds)) % 60:02d}"


def new_results(plan: Plan, missing: dict[str, str]) -> Results:
    """What is known before anything is measured."""
    return Results(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=commit(),
        threads=plan.threads,
        machine=description(),
        versions={
            "torch": version("torch"),
            "transformers": version("transformers"),
            "nixl": version("nixl"),
            **{peer: what for peer, what in VERSIONS.items() if peer in plan.wanted_peers and peer not in missing},
        },
        missing={**missing, **NOT_HERE},
    )


def commit() -> str:
    """Of this checkout, with "-dirty" behind it where it was changed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "not a git checkout"
