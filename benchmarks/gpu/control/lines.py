"""Lines of JSON, one for each thing that is known, written as soon as it is: a run may be ended from outside.

Lines are only ever appended. A `Begin` without its `End` is a case that was cut off, and is done again.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

NAME = "lines.jsonl"
MAX_NAMES = 12
"""Of kernels in a table."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One ratio, its target if it has one, and what it was computed from."""

    name: str
    ratio: float
    of: str
    """What it is a fraction or a multiple of."""
    target: float | None = None
    at_most: bool = False
    """Whether the target is the most that the ratio may be; else it is the least."""
    spread: float | None = None
    """Of the measured times: from the first to the last quarter, as a fraction of the median."""
    facts: dict[str, float] = {}
    """Microseconds, bytes per second and the like."""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    part: str


class Machine(_Line, tag="machine"):
    """Where and with what a part ran; the first line of each of its processes."""

    facts: dict[str, str]


class Ceilings(_Line, tag="ceilings"):
    """What the device does at best, before or after the cases of a process."""

    when: str
    copy_gb_s: float
    matmul_tflops: float
    clocks: str = ""


class Begin(_Line, tag="begin"):
    case: str


class End(_Line, tag="end"):
    """The case is not done again, whatever it gave."""

    case: str
    seconds: float


class Measured(_Line, tag="figure"):
    case: str
    figure: Figure


class Missing(_Line, tag="missing"):
    """What a case did not give, and why."""

    case: str
    why: str
    failed: bool = True
    """Whether something is wrong; else there was no time, or the machine lacks what it needs."""


class Check(_Line, tag="check"):
    """A test: passed, failed or skipped."""

    case: str
    outcome: str
    why: str = ""
    seconds: float = 0.0


class Compiled(_Line, tag="compiled"):
    """Kernels that Triton compiled in a part: its cache had not got them, from the kit or an earlier part."""

    kernels: list[str]
    """Names, one for each."""

    @property
    def text(self) -> str:
        names = [*dict.fromkeys(self.kernels)]
        named = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
        return f"{len(self.kernels)} ({named})" if names else "0"


Line = Machine | Ceilings | Begin | End | Measured | Missing | Check | Compiled


class LineFile:
    """The file of a run; several processes append to it, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def write(self, line: Line) -> None:
        """Opened and closed for each line, so that a killed process loses none. A partial line before it is cut off."""
        whole = self._whole()
        with self._path.open("ab") as file:
            file.truncate(whole)
            file.write(msgspec.json.encode(line) + b"\n")

    def _whole(self) -> int:
        """Bytes of the file up to its last whole line."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if size == 0 or file.read(1) == b"\n":
                return size
            file.seek(0)
            return file.read().rfind(b"\n") + 1

    def read(self) -> list[Line]:
        """All complete lines. The last line may be partial, if its writer was killed."""
        return list(self._decoded())

    def _decoded(self) -> Iterator[Line]:
        if not self._path.exists():
            return
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            if line:
                yield msgspec.json.decode(line, type=Line)


def ended(lines: list[Line], part: str) -> set[str]:
    """Cases of a part that are not done again."""
    return {line.case for line in lines if isinstance(line, End) and line.part == part}


def open_case(lines: list[Line], part: str) -> str | None:
    """The case in which the part's last process ended; None if it was in none."""
    begun: str | None = None
    for line in lines:
        if line.part != part:
            continue
        if isinstance(line, Begin):
            begun = line.case
        elif isinstance(line, Machine) or (isinstance(line, End) and line.case == begun):
            begun = None
    return begun
