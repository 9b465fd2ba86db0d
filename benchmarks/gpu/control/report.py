"""The table of a run: shares of ceilings, targets, verdicts; what is missing, and why."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from gpu.control.lines import Ceilings, Check, Compiled, Line, LineFile, Machine, Measured, Missing, ended
from gpu.control.parts import PARTS
from gpu.control.state import State, Status
from gpu.figures import HEAD, figure_row, row

MAX_SPREAD = 0.03
"""Between ceilings before and after; with more, figures between them are marked."""
T = TypeVar("T", bound=Line)
GOOD = (Status.DONE, Status.SKIPPED, Status.LEFT, Status.NO_TIME)


class Report:
    """Of the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.lines, self.state = LineFile(folder).read(), State.read(folder)

    @property
    def failures(self) -> list[str]:
        """What is wrong, rather than not measured."""
        parts = [f"{name}: {each.status}" for name, each in self.state.parts.items() if each.status not in GOOD]
        cases = [f"{line.part}: {line.case}" for line in self.missing if line.failed]
        tests = [f"{line.part}: {line.case}" for line in self._of(Check) if line.outcome == "failed"]
        return [*parts, *cases, *tests]

    @property
    def missing(self) -> list[Missing]:
        """The latest result of each case: a later call may have measured what the first had no time for."""
        measured = {name: ended(self.lines, name) for name in {line.part for line in self.lines}}
        last = {(line.part, line.case): line for line in self._of(Missing)}
        return [line for line in last.values() if line.failed or line.case not in measured[line.part]]

    def spreads(self) -> dict[str, float]:
        """By part: how far its ceilings lie apart, as a fraction of the largest."""
        found = {}
        for part in dict.fromkeys(line.part for line in self._of(Ceilings)):
            of_part = [line for line in self._of(Ceilings) if line.part == part]
            columns = ([line.copy_gb_s for line in of_part], [line.matmul_tflops for line in of_part])
            found[part] = max(1 - min(column) / max(column) for column in columns)
        return found

    def table(self) -> str:
        """For a terminal and for docs/benchmarks.md."""
        return "\n".join([*self._machines(), "", *self._figures(), "", *self._parts(), "", *self._rest()])

    def json(self) -> str:
        """One line: all lines, the state, spreads and failures."""
        return json.dumps(
            {
                "lines": msgspec.to_builtins(self.lines),
                "parts": msgspec.to_builtins(self.state.parts),
                "spreads": self.spreads(),
                "failures": self.failures,
            }
        )

    def _of(self, kind: type[T]) -> list[T]:
        return [line for line in self.lines if isinstance(line, kind)]

    def _machines(self) -> Iterable[str]:
        seen = {json.dumps({**line.facts, "date": ""}): line.facts for line in self._of(Machine)}
        for facts in seen.values():
            yield ", ".join(f"{name} {value}" for name, value in facts.items())
        for line in self._of(Ceilings):
            clocks = f" ({line.clocks})" if line.clocks else ""
            rates = f"copy {line.copy_gb_s:.5g} GB/s, matmul {line.matmul_tflops:.5g} TFLOP/s"
            yield f"{line.part}, {line.when}: {rates}{clocks}"

    def _figures(self) -> Iterable[str]:
        marked = {part for part, spread in self.spreads().items() if spread > MAX_SPREAD}
        yield row(HEAD)
        yield row("---" for _ in HEAD)
        for line in self._of(Measured):
            yield figure_row(line.figure, mark="*" if line.part in marked else "")
        for part in sorted(marked):
            yield f"\\* {part}: ceilings before and after are {self.spreads()[part]:.1%} apart"

    def _parts(self) -> Iterable[str]:
        yield row(("part", "ended", "seconds", "tests", "compiled", "why"))
        yield row("---" for _ in range(6))
        for part in PARTS:
            if part.name not in self.state.parts:
                yield row((part.name, "not begun", "", "", "", ""))
                continue
            state = self.state.parts[part.name]
            tests = Counter(line.outcome for line in self._of(Check) if line.part == part.name)
            counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tests.items()))
            compiled = "; ".join(line.text for line in self._of(Compiled) if line.part == part.name)
            yield row((part.name, state.status, f"{state.seconds:g}", counted, compiled, state.why))

    def _rest(self) -> Iterable[str]:
        for line in self.missing:
            yield f"{'failed' if line.failed else 'not measured'}: {line.part}: {line.case}: {line.why}"
        for check in self._of(Check):
            if check.outcome == "failed":
                yield f"test failed: {check.part}: {check.case}: {_short(check.why)}"


def _short(text: str, most: int = 300) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[-1][:most]
