"""A figure as a row of a table."""

from collections.abc import Iterable

from gpu.control.lines import Figure

HEAD = ("figure", "ratio", "of", "target", "", "facts")


def figure_row(figure: Figure, *, mark: str = "") -> str:
    facts = dict(figure.facts) | ({} if figure.spread is None else {"spread": figure.spread})
    shown = ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
    verdict = {None: "", True: "met", False: "missed"}[figure.met]
    target = "" if figure.target is None else f"{'≤' if figure.at_most else '≥'} {figure.target:g}"
    return row((figure.name, f"{figure.ratio:.3g}{mark}", figure.of, target, verdict, shown))


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
