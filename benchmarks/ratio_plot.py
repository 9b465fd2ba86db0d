"""A plot of ratios as an SVG file, without a plotting library: groups of bars on a logarithmic axis."""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 760, 230, 60, 70, 13, 12
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


def draw(path: Path, groups: Mapping[str, Mapping[str, float]], *, title: str, marks: Mapping[str, float]) -> None:
    """Write `groups` (row → name → ratio, above 0) to `path`; `marks` draws a line through a row at a ratio."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    ratios = [ratio for group in groups.values() for ratio in group.values()] + list(marks.values())
    scale = _Scale(min(0.5, *ratios), max(2.0, *ratios))
    rows, y = [], TOP
    for row, group in groups.items():
        rows += _row(row, group, names, scale, y, marks.get(row))
        y += len(group) * BAR + GAP
    box = f'viewBox="0 0 {WIDTH} {y + 10}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{y + 10}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        *_legend(names),
        *scale.axis(y),
        *rows,
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Scale:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = math.log(low / 1.1), math.log(high * 1.1)

    def x(self, ratio: float) -> float:
        return round(LEFT + (math.log(ratio) - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT), 1)

    def axis(self, bottom: float) -> list[str]:
        lines = []
        for tick in _TICKS:
            if self.low <= math.log(tick) <= self.high:
                color, width = ("black", 1.5) if tick == 1 else ("#dddddd", 1)
                lines.append(f'<path d="M{self.x(tick)} {TOP - 6}V{bottom}" stroke="{color}" stroke-width="{width}"/>')
                lines.append(f'<text x="{self.x(tick)}" y="{TOP - 10}" text-anchor="middle">{tick:g}</text>')
        return lines


def _row(
    row: str, group: Mapping[str, float], names: list[str], scale: _Scale, top: float, mark: float | None
) -> list[str]:
    height = len(group) * BAR
    lines = [f'<text x="{LEFT - 8}" y="{top + height / 2 + 4}" text-anchor="end">{escape(row)}</text>']
    for place, (name, ratio) in enumerate(group.items()):
        y, ends = top + place * BAR, sorted((scale.x(1.0), scale.x(ratio)))
        color = COLORS[names.index(name) % len(COLORS)]
        width = max(1.0, round(ends[1] - ends[0], 1))
        lines.append(f'<rect x="{ends[0]}" y="{y + 1}" width="{width}" height="{BAR - 2}" fill="{color}"/>')
        lines.append(f'<text x="{ends[1] + 4}" y="{y + BAR - 3}" font-size="10">{ratio:.2f}</text>')
    if mark is not None:
        x = scale.x(mark)
        lines.append(f'<path d="M{x} {top - 2}V{top + height + 2}" stroke="black" stroke-dasharray="3 2"/>')
    return lines


def _legend(names: list[str]) -> list[str]:
    lines, x = [], 10
    for number, name in enumerate(names):
        color = COLORS[number % len(COLORS)]
        lines.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17}" y="44">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    return lines
