"""What a run has found: figures beside what they should be, as a table and as one JSON object.

Each figure is also told on standard error as soon as it is known, for a run may be ended from outside; and what raises
costs the rest of the run nothing but itself.
"""

import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One ratio, its target if it has one, and what it was computed from."""

    name: str
    ratio: float
    of: str
    """What it is a fraction or a multiple of."""
    target: float | None = None
    at_most: bool = False
    """Whether the target is the most that the ratio may be; else it is the least."""
    facts: dict[str, float] = field(default_factory=dict)
    """Microseconds, bytes per second and the like."""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


@dataclass(kw_only=True)
class Report:
    """All figures of a run on one device."""

    machine: dict[str, str]
    ceilings: dict[str, float] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    failures: int = 0
    """Of them, how many raised."""

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        sys.stderr.write(f"{_line(figure)}\n")
        sys.stderr.flush()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An error within is what is missing; its traceback is on standard error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary: figures of other work mean what they did
            traceback.print_exc()
            self.failures += 1
            first = (str(error).splitlines() or [""])[0]
            self.missing.append(f"{what}: {type(error).__name__}: {first[:200]}")

    def table(self) -> str:
        """For a terminal and for docs/benchmarks.md."""
        head = ("figure", "ratio", "of", "target", "", "facts")
        lines = [_row(head), _row("---" for _ in head), *map(_line, self.figures)]
        lines += [f"\nnot measured: {line}" for line in self.missing]
        return "\n".join(lines)

    def json(self) -> str:
        """One line. `targets` lists {name, ratio, target} of what has one."""
        targets: list[dict[str, Any]] = [
            {"name": each.name, "ratio": each.ratio, "target": each.target, "at_most": each.at_most}
            for each in self.figures
            if each.target is not None
        ]
        return json.dumps(
            {
                "machine": self.machine,
                "ceilings": self.ceilings,
                "figures": [asdict(each) for each in self.figures],
                "targets": targets,
                "missing": self.missing,
            }
        )


def _line(figure: Figure) -> str:
    ratio = f"{figure.ratio:.3g}"
    return _row((figure.name, ratio, figure.of, _target(figure), _verdict(figure), _facts(figure.facts)))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _target(figure: Figure) -> str:
    return "" if figure.target is None else f"{'≤' if figure.at_most else '≥'} {figure.target:g}"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "met", False: "missed"}[figure.met]


def _facts(facts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
