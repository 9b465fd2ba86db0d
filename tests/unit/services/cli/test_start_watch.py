"""The wait of `tandem up`: what ends it, and what only delays it. Children are real, time and CPU time are not."""

import io
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.processes import MAX_RESTARTS, Child, Supervisor, session_cpu_seconds
from tandem_services.cli.start_view import Lines
from tandem_services.cli.start_watch import Readiness, StartWatch, Watched
from tandem_services.common.errors import StartupError
from tandem_testing.waiting import wait_for

STALL_S = 120.0
SLEEP = "import time; time.sleep(1000)"
SPIN = "while True: pass"
SPIN_IN_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
FAILS = "import sys; sys.exit(1)"
UP_S = 60.0


@dataclass
class Start:
    """A start under a clock that only `sleep` moves."""

    folder: Path
    supervisor: Supervisor = field(default_factory=Supervisor)
    watched: list[Watched] = field(default_factory=list)
    out: io.StringIO = field(default_factory=io.StringIO)
    time_s: float = 0.0
    ready_at: dict[str, float] = field(default_factory=dict)
    cpu_share: float = 0.0
    each_turn: list = field(default_factory=list)
    probes: int = 0
    events: list[str] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def child(self, name: str, code: str = SLEEP, *, after: tuple[str, ...] = (), ready_at: float = 1e9) -> Child:
        child = Child(
            name=name,
            argv=[sys.executable, "-c", code],
            log=self.folder / f"{name}.log",
            progress=self.folder / f"{name}.progress",
        )
        self.supervisor.start(child)
        self.watched.append(Watched(child=child, label=name, url=name, after=after))
        self.ready_at[name] = ready_at
        return child

    def run(self, *, limit_s: float | None = None, step_s: float = 0.5) -> None:
        def sleep(seconds: float) -> None:
            del seconds
            self.time_s += step_s
            for act in self.each_turn:
                act()

        def probe(url: str) -> Readiness:
            self.probes += 1
            return Readiness(ready=self.time_s >= self.ready_at[url])

        StartWatch(
            watched=self.watched,
            supervisor=self.supervisor,
            view=Lines(self.out),
            clock=self,
            sleep=sleep,
            probe=probe,
            cpu_seconds=lambda sessions: dict.fromkeys(sessions, self.time_s * self.cpu_share),
            restarting=self.events.append,
            stall_s=STALL_S,
            limit_s=limit_s,
        ).run()


@pytest.fixture
def start(tmp_path):
    made = Start(folder=tmp_path)
    yield made
    for watched in made.watched:
        # With what it has started, which does not end with it.
        with suppress(ProcessLookupError):
            os.killpg(watched.child.session, signal.SIGKILL)
    made.supervisor.stop(0.0)


def report(child: Child, phase: str, done: int = 0, total: int = 0) -> None:
    assert child.progress is not None
    child.progress.write_text(json.dumps({"phase": phase, "done": done, "total": total, "unit": ""}))


def test_silent_sleeper_ends_the_start_by_name(start):
    child = start.child("decode-0")
    report(child, "kernels", 7, 16)
    child.output.take(b"10:00:00.000 first\n10:00:00.000 reading weights\n")
    with pytest.raises(StartupError) as raised:
        start.run()
    assert str(raised.value) == (
        "decode-0 made no progress for 120 s while starting (kernels 7 of 16); the last line of its log: "
        f"10:00:00.000 reading weights (log: {child.log}). Wait longer with --stall-timeout"
    )
    assert STALL_S <= start.time_s <= STALL_S + 2


def test_spinning_child_is_waited_for(start):
    start.child("decode-0", ready_at=1000.0)
    start.cpu_share = 0.02
    start.run()
    assert start.time_s >= 1000.0


def test_child_with_too_little_cpu_time_has_stalled(start):
    start.child("decode-0", ready_at=1000.0)
    start.cpu_share = 0.005
    with pytest.raises(StartupError, match="no progress for 120 s"):
        start.run()


def test_logging_child_is_waited_for(start):
    child = start.child("decode-0", ready_at=1000.0)

    def log() -> None:
        if start.time_s % 100 == 0:
            child.output.take(b"a line\n")

    start.each_turn.append(log)
    start.run()
    assert start.time_s >= 1000.0


def test_starting_child_with_progress_is_awaited(start):
    child = start.child("decode-0", ready_at=1000.0)
    start.each_turn.append(lambda: report(child, "weights", int(start.time_s) // 100, 10))
    start.run()
    assert start.time_s >= 1000.0


def test_limit_ends_a_busy_start(start):
    start.child("decode-0")
    start.cpu_share = 1.0
    with pytest.raises(StartupError, match=r"not ready after 300 s: decode-0 \(imports\); logs: .*decode-0.log"):
        start.run(limit_s=300.0)


def test_exit_is_named_with_phase_status_and_log(start):
    child = start.child("decode-0", "import sys; sys.exit('tandem: error: model-2 ends early')")
    assert child.process is not None
    child.process.wait(UP_S)
    report(child, "weights", 61, 100)
    with pytest.raises(StartupError) as raised:
        start.run()
    assert str(raised.value) == (
        f"decode-0 exited with status 1 while starting (weights 61 of 100): model-2 ends early (log: {child.log})"
    )


def test_worker_that_ends_while_others_serve_starts_again(start):
    start.child("decode-0", ready_at=0.0)
    child = start.child("decode-1", FAILS)
    child.pause = 0.0
    start.child("gateway", after=("decode-0", "decode-1"), ready_at=0.0)
    start.each_turn.append(lambda: start.ready_at.update({"decode-1": 0.0 if child.restarts == 2 else 1e9}))
    start.run(step_s=0.0)
    ended = f"decode-1 exited with status 1; restarting in 0 s (log: {child.log})"
    assert start.events[:4] == [ended, "decode-1 restarted", ended, "decode-1 restarted"]


def test_gateway_that_ends_after_it_served_starts_again(start):
    start.child("decode-0", ready_at=0.0)
    start.child("decode-1")
    gateway = start.child("gateway", after=("decode-0", "decode-1"), ready_at=0.0)
    gateway.pause = 0.0

    def act() -> None:
        if gateway.restarts == 0 and gateway.status is None:
            gateway.process.kill()
            gateway.process.wait(UP_S)
        if gateway.restarts == 1:
            start.ready_at["decode-1"] = 0.0

    start.each_turn.append(act)
    start.run()
    assert start.events[1:] == ["gateway restarted"]
    assert gateway.status is None


@pytest.mark.parametrize(
    ("status", "problem", "restarts"), [(1, StartupError, MAX_RESTARTS), (2, ConfigError, 0), (3, StartupError, 0)]
)
def test_worker_that_cannot_start_ends_a_start_that_serves(start, status, problem, restarts):
    start.child("decode-0", ready_at=0.0)
    start.child("gateway", after=("decode-0", "decode-1"), ready_at=0.0)
    child = start.child("decode-1", f"import sys; sys.exit({status})")
    child.pause = 0.0
    with pytest.raises(problem, match=f"decode-1 exited with status {status} while starting"):
        start.run(step_s=0.0)
    assert child.restarts == restarts


def test_refused_flag_is_wrong_usage(start):
    child = start.child("decode-0", "import sys; sys.exit(2)")
    assert child.process is not None
    child.process.wait(UP_S)
    with pytest.raises(ConfigError, match="decode-0 exited with status 2"):
        start.run()


def test_gateway_cannot_stall_before_its_workers_are_ready(start):
    worker = start.child("decode-0", ready_at=500.0)
    start.child("gateway", after=("decode-0",), ready_at=600.0)
    start.each_turn.append(lambda: report(worker, "weights", int(start.time_s) // 100, 10))
    start.run()
    assert start.time_s >= 600.0


def test_pause_of_the_watch_itself_is_no_stall(start):
    start.child("decode-0", ready_at=1500.0)
    start.run(step_s=500.0)
    assert start.time_s >= 1500.0


def test_probes_get_rare_without_news(start):
    start.child("decode-0", ready_at=100.0)
    start.run(step_s=0.1)
    assert start.probes < 150


def test_lines_name_each_phase_and_appear_every_ten_seconds(start):
    child = start.child("decode-0", ready_at=35.0)

    def progress() -> None:
        if start.time_s == 1:
            report(child, "weights", 1, 2)
        elif start.time_s == 2:
            report(child, "kernels", 3, 4)

    start.each_turn.append(progress)
    start.run()
    assert start.out.getvalue().splitlines() == [
        "decode-0: imports, 0.0 s after the start",
        "decode-0: weights 1 of 2, 1.0 s after the start",
        "decode-0: kernels 3 of 4, 2.0 s after the start",
        "decode-0: kernels 3 of 4 for 10 s",
        "decode-0: kernels 3 of 4 for 20 s",
        "decode-0: kernels 3 of 4 for 30 s",
        "ready decode-0 after 36.5 s",
    ]


def test_progress_of_an_earlier_start_does_not_count(start):
    (start.folder / "decode-0.progress").write_text('{"phase": "kernels", "done": 1, "total": 2, "unit": ""}')
    start.child("decode-0", ready_at=0.0)
    start.run()
    assert "kernels" not in start.out.getvalue()


@pytest.mark.parametrize("code", [SPIN, SPIN_IN_CHILD])
def test_cpu_time_of_a_session_counts_all_its_processes(start, code):
    child = start.child("decode-0", code)
    wait_for(lambda: session_cpu_seconds([child.session])[child.session] > 0.3, UP_S)
    assert session_cpu_seconds([2**30]) == {2**30: 0.0}
