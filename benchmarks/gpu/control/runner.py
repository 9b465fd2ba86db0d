"""Runs parts, each in a separate process that is killed at a limit, with all processes that it has started.

A process that dies in a case costs that case: the part is restarted after it. Results are on disk at every moment,
and a second call runs what is left.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpu.control import child, folder
from gpu.control.lines import Compiled, End, LineFile, Missing, open_case
from gpu.control.parts import REHEARSAL, Part
from gpu.control.state import PartState, State, Status
from gpu.kit.manifest import GROUP
from tandem_engine.base.linux import die_with_parent

MIN_S = 20.0
"""A part is not begun with less."""
GRACE_S = 12.0
"""A part that plans its time ends so long before it would be ended."""
MAX_CRASHES = 5
TRITON_CACHE = "~/.triton/cache"
"""Unless TRITON_CACHE_DIR names another."""
ENDINGS = {0: Status.DONE, child.LEFT: Status.LEFT, child.SKIPPED: Status.SKIPPED}


@dataclass(kw_only=True)
class Runner:
    """One call of a run."""

    out: Path
    ends_at: float
    """By `time.monotonic`."""
    dry_run: bool = False
    command: Callable[[Part, float], Sequence[str]] | None = None
    """Of a part's process, for so many seconds; None is that of `child`."""
    kernels: Path = field(default_factory=lambda: Path(os.environ.get("TRITON_CACHE_DIR", TRITON_CACHE)).expanduser())
    """Triton's cache."""

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._lines, self._log, self._state = LineFile(self.out), folder.Log(self.out), State.read(self.out)

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def run(self, parts: Sequence[Part]) -> State:
        """All of them that are not done, as far as there is time."""
        for part in parts:
            if self._state.done(part.name):
                continue
            if self.left_s < MIN_S:
                self._is(part, Status.NO_TIME, why=f"{max(0.0, self.left_s):.0f} s were left")
                continue
            self._is(part, Status.RUNNING)
            began, kernels = time.monotonic(), self._cached()
            status, why = self._run(part)
            self._name_compiled(part, self._cached() - kernels)
            self._is(part, status, seconds=time.monotonic() - began, why=why)
        return self._state

    def _is(self, part: Part, status: Status, *, seconds: float = 0.0, why: str = "") -> None:
        self._state.parts[part.name] = PartState(status=status, seconds=round(seconds, 1), why=why)
        self._state.write(self.out)
        self._say(f"== {part.name}: {status}{f' ({why})' if why else ''}\n".encode())

    def _cached(self) -> set[Path]:
        """Of each kernel in Triton's cache the list of its files."""
        return set(self.kernels.glob(f"*/{GROUP}*.json"))

    def _name_compiled(self, part: Part, new: set[Path]) -> None:
        """For the report: with a kit's kernels there should be few. A rehearsal compiles none."""
        if not self.dry_run:
            line = Compiled(part=part.name, kernels=sorted(path.stem.removeprefix(GROUP) for path in new))
            self._lines.write(line)
            self._say(f"== {part.name}: kernels compiled: {line.text}\n".encode())

    def _run(self, part: Part) -> tuple[Status, str]:
        ends_at = min(self.ends_at, time.monotonic() + self._limit(part))
        own_limit = ends_at < self.ends_at
        for _ in range(MAX_CRASHES):
            code = self._process(part, ends_at - time.monotonic())
            if code is None:
                return self._ended(part, own_limit=own_limit)
            if code in ENDINGS:
                return ENDINGS[code], ""
            case = open_case(self._lines.read(), part.name)
            if code != child.LOST and case is None:
                return Status.CRASHED, f"its process ended with status {code} outside of its cases"
            if case is not None:
                self._close(part, case, f"the process ended with status {code}")
            if ends_at - time.monotonic() < MIN_S:
                return Status.LEFT, "no time to start it again"
        return Status.CRASHED, f"its process crashed {MAX_CRASHES} times"

    def _ended(self, part: Part, *, own_limit: bool) -> tuple[Status, str]:
        """After a process that has reached the limit; the case is done again if it was cut off by the run's end."""
        case = open_case(self._lines.read(), part.name)
        if not own_limit:
            return Status.LEFT, "the run's time was over"
        if case is not None:
            self._close(part, case, f"no end within the part's {self._limit(part):.0f} s")
        return Status.HUNG, f"ended at its limit of {self._limit(part):.0f} s"

    def _limit(self, part: Part) -> float:
        """Seconds. Limits are those of a device, which is alone; a CPU that tries the programs may be busy."""
        return part.seconds * (REHEARSAL if self.dry_run else 1.0)

    def _close(self, part: Part, case: str, why: str) -> None:
        self._lines.write(Missing(part=part.name, case=case, why=why))
        self._lines.write(End(part=part.name, case=case, seconds=0.0))

    def _process(self, part: Part, limit_s: float) -> int | None:
        """Exit status of one process; None when it was ended at the limit."""
        planned = max(1.0, limit_s - min(GRACE_S, limit_s / 4))
        command = self.command(part, planned) if self.command else self._of_child(part, planned)
        process = subprocess.Popen(
            command,
            env={**os.environ, **({"TRITON_INTERPRET": "1"} if self.dry_run else {}), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  only prctl runs between fork and exec
        )
        assert process.stdout is not None
        reading = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        reading.start()
        try:
            return process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_group(process.pid)
            process.wait()
            reading.join(5.0)

    def _of_child(self, part: Part, seconds: float) -> list[str]:
        command = [sys.executable, "-m", "gpu.control.child", part.name]
        command += ["--out", str(self.out), "--seconds", f"{seconds:.1f}"]
        return [*command, *(["--dry-run"] if self.dry_run else [])]

    def _copy(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._say(line)

    def _say(self, text: bytes) -> None:
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()
        self._log.write(text)


def _kill_group(leader: int) -> None:
    """With all that it has started and that has not left its group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
