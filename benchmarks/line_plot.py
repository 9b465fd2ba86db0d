"""A line plot as an SVG file, without a plotting library: one line per series, both axes linear from zero or
logarithmic."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 420, 70, 50, 40, 150
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
Series = Mapping[str, Mapping[float, float]]


def draw(path: Path, series: Series, *, title: str, x_label: str, y_label: str, logarithmic: bool = False) -> None:
    """Write `series` (name → x → y) to `path`; `logarithmic` of both axes, for values above 0."""
    xs = [x for points in series.values() for x in points]
    ys = [y for points in series.values() for y in points.values()]
    plot = _LogPlot(min(xs), max(xs), min(ys), max(ys)) if logarithmic else _Plot(max(xs), max(ys) * 1.05)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *plot.axes({x for points in series.values() for x in points}, x_label, y_label),
        *(line for number, (name, points) in enumerate(series.items()) for line in plot.line(number, name, points)),
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Plot:
    """Scales of one plot."""

    def __init__(self, right: float, top: float) -> None:
        self.right, self.top = right, top

    def x(self, value: float) -> float:
        return round(LEFT + value / self.right * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value / self.top * (HEIGHT - BOTTOM - TOP), 1)

    def axes(self, ticks: set[float], x_label: str, y_label: str) -> list[str]:
        lines = [
            f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="black"/>',
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
            f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
        ]
        for tick in self.marked(sorted(ticks)):
            lines.append(f'<text x="{self.x(tick)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
        for value, text in self.levels():
            lines.append(f'<path d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{self.y(value) + 4}" text-anchor="end">{text}</text>')
        return lines

    def marked(self, ticks: Sequence[float]) -> list[float]:
        """Those of `ticks` that have room for their number."""
        return [tick for tick in ticks if tick == 0 or tick / self.right > 0.08]

    def levels(self) -> list[tuple[float, str]]:
        return [(self.top * step / 5, f"{self.top * step / 5:.0f}") for step in range(6)]

    def line(self, number: int, name: str, points: Mapping[float, float]) -> list[str]:
        color = COLORS[number % len(COLORS)]
        way = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in sorted(points.items()))
        dots = [f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="3" fill="{color}"/>' for x, y in points.items()]
        label_y = TOP + 18 * number + 10
        return [
            f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"/>',
            *dots,
            f'<path d="M{WIDTH - RIGHT + 14} {label_y}h22" stroke="{color}" stroke-width="2"/>',
            f'<text x="{WIDTH - RIGHT + 42}" y="{label_y + 4}">{escape(name)}</text>',
        ]


class _LogPlot(_Plot):
    """The same with powers of ten at equal distances."""

    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        super().__init__(right, top)
        self._from_x, self._to_x = math.log10(left), math.log10(right)
        self._from_y, self._to_y = math.floor(math.log10(bottom)), math.ceil(math.log10(top))

    def x(self, value: float) -> float:
        share = (math.log10(value) - self._from_x) / max(self._to_x - self._from_x, 1e-9)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self._from_y) / max(self._to_y - self._from_y, 1)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    def marked(self, ticks: Sequence[float]) -> list[float]:
        return list(ticks)

    def levels(self) -> list[tuple[float, str]]:
        return [(10.0**power, f"{10.0**power:g}") for power in range(self._from_y, self._to_y + 1)]
