"""A line plot as an SVG file, without a plotting library: one line per series, both axes linear from zero."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 420, 70, 50, 40, 150
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
Series = Mapping[str, Mapping[float, float]]


def draw(path: Path, series: Series, *, title: str, x_label: str, y_label: str) -> None:
    """Write `series` (name → x → y) to `path`."""
    right = max(x for points in series.values() for x in points)
    top = max(y for points in series.values() for y in points.values()) * 1.05
    plot = _Plot(right, top)
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
        for tick in sorted(ticks):
            if tick == 0 or tick / self.right > 0.08:
                lines.append(
                    f'<text x="{self.x(tick)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
                )
        for step in range(6):
            value = self.top * step / 5
            lines.append(f'<path d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{self.y(value) + 4}" text-anchor="end">{value:.0f}</text>')
        return lines

    def line(self, number: int, name: str, points: Mapping[float, float]) -> list[str]:
        colour = COLOURS[number % len(COLOURS)]
        way = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in sorted(points.items()))
        dots = [f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="3" fill="{colour}"/>' for x, y in points.items()]
        label_y = TOP + 18 * number + 10
        return [
            f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *dots,
            f'<path d="M{WIDTH - RIGHT + 14} {label_y}h22" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - RIGHT + 42}" y="{label_y + 4}">{escape(name)}</text>',
        ]
