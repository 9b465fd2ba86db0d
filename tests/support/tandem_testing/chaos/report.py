"""Outcomes for people and for machines."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem_testing.chaos.compare import Damage
from tandem_testing.chaos.runner import Outcome
from tandem_testing.chaos.scenario import Result

COLORS = {Result.KEPT: "green", Result.BROKEN: "bold red", Result.ABSENT: "yellow"}
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}


def print_outcome(console: Console, outcome: Outcome) -> None:
    """One line, and a line for each reason why a promise is broken."""
    color = COLORS[outcome.result]
    line = outcome.promise
    console.print(
        f"[{color}]{outcome.result.value:7}[/] {line.number:>3}  {line.title:42} {_recovery(outcome):>9}"
        f"   {outcome.requests:4d} requests   {outcome.seconds:5.0f} s",
        highlight=False,
    )
    for problem in outcome.problems:
        console.print(f"             {problem}", style="red", markup=False, highlight=False)
    for note in outcome.notes:
        console.print(f"             {note}", style="dim", markup=False, highlight=False)


def summary_table(outcomes: Sequence[Outcome]) -> Table:
    """Promise, result, recovery and bound of each scenario."""
    table = Table(title="Promises under faults", title_justify="left", header_style="bold")
    for heading in ("#", "scenario", "promise", "result"):
        table.add_column(heading, overflow="fold")
    for heading in ("recovery", "bound", "here"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        line = outcome.promise
        table.add_row(
            str(line.number),
            line.title,
            line.promise,
            f"[{COLORS[outcome.result]}]{outcome.result.value}[/]",
            _recovery(outcome),
            _seconds(line.bound_s),
            _seconds(outcome.allowed_s),
        )
    return table


def summary_line(outcomes: Sequence[Outcome]) -> str:
    """What must be zero, and how long clients had to wait after a fault."""
    figures = totals(outcomes)
    counts = ", ".join(f"{figures[name]} {name}" for name in ("wrong", "missing", "doubled", "failed", "leaked"))
    waits = ", ".join(f"{name} {_seconds(value)}" for name, value in figures["recovery"].items())
    results = f"{figures['kept']} kept, {len(figures['broken'])} broken, {len(figures['absent'])} absent"
    return f"{figures['scenarios']} scenarios: {results}. {figures['requests']} requests: {counts}. Recovery: {waits}."


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `--json` prints: every count that must be zero, and how long clients had to wait."""
    damage = sum((outcome.damage for outcome in outcomes), Damage())
    stalls = [stall for outcome in outcomes for stall in outcome.stalls]
    results = [outcome.result for outcome in outcomes]
    return {
        "scenarios": len(outcomes),
        "kept": results.count(Result.KEPT),
        "broken": [outcome.promise.number for outcome in outcomes if outcome.result is Result.BROKEN],
        "absent": [outcome.promise.number for outcome in outcomes if outcome.result is Result.ABSENT],
        "requests": sum(outcome.requests for outcome in outcomes),
        "wrong": damage.wrong,
        "missing": damage.missing,
        "doubled": damage.doubled,
        "failed": damage.failed,
        "leaked": damage.leaked,
        "recovery": _percentiles(stalls),
        "stalls": stalls_by_name(outcomes),
    }


def stall_table(outcomes: Sequence[Outcome]) -> Table | None:
    """The longest silence of each stream that something happened to; None where no scenario tells."""
    table = Table(title="Longest silence of a stream", title_justify="left", header_style="bold")
    for heading in ("streams that met", "", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="left" if heading == "streams that met" else "right", no_wrap=True)
    for name, figures in stalls_by_name(outcomes).items():
        table.add_row(name, str(figures["streams"]), *(_seconds(figures[each]) for each in PERCENTILES))
    return table if table.row_count else None


def stalls_by_name(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Over all runs, by scenario and by what happened to the streams."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, silences in outcome.samples.items():
            found.setdefault(f"{outcome.promise.number} {name}", []).extend(silences)
    return {name: {"streams": len(silences)} | _percentiles(silences) for name, silences in found.items() if silences}


def json_line(outcomes: Sequence[Outcome]) -> str:
    return json.dumps(totals(outcomes))


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {name: _percentile(ordered, share) for name, share in PERCENTILES.items()}


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of all do not exceed; None without any."""
    if not ordered:
        return None
    return round(ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)], 3)


def _recovery(outcome: Outcome) -> str:
    return _seconds(outcome.recovery_s)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
