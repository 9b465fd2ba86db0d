"""Policies side by side as an SVG file, without a plotting library: one panel of bars for each figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

PANEL, GAP, LABELS, HEADER, ROW, COLUMNS = 250, 30, 110, 46, 24, 3
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One figure, by policy."""

    title: str
    values: Mapping[str, float]
    line: float | None = None
    """A limit to draw across the bars."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The SVG text."""
    rows = -(-len(panels) // COLUMNS)
    tallest = max((len(panel.values) for panel in panels), default=0)
    height = HEADER + tallest * ROW + GAP
    width = COLUMNS * (LABELS + PANEL + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * height + 40}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{rows * height + 40}" fill="white"/>',
        f'<text x="{GAP}" y="26" font-size="15">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        left = GAP + (number % COLUMNS) * (LABELS + PANEL + GAP)
        parts += _panel(panel, left, 40 + number // COLUMNS * height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    largest = max([*panel.values.values(), panel.line or 0.0, 1e-12])
    # Half of the label's width is kept for the number behind the longest bar.
    scale = (PANEL - LABELS / 2) / largest
    parts = [f'<text x="{left}" y="{top + 24}" font-weight="bold">{escape(panel.title)}</text>']
    for row, (name, value) in enumerate(panel.values.items()):
        y = top + HEADER - 10 + row * ROW
        length = round(value * scale, 1)
        colour = COLOURS[row % len(COLOURS)]
        parts += [
            f'<text x="{left + LABELS - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left + LABELS}" y="{y}" width="{length}" height="{ROW - 6}" fill="{colour}"/>',
            f'<text x="{left + LABELS + length + 5}" y="{y + 13}">{value:.4g}</text>',
        ]
    if panel.line is not None:
        x = round(left + LABELS + panel.line * scale, 1)
        bottom = top + HEADER - 10 + len(panel.values) * ROW
        parts.append(f'<path d="M{x} {top + HEADER - 14}V{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    return parts
