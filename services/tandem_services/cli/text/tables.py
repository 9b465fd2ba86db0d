"""Tables and numbers as commands print them."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart. The last cell of a row is as long as its text,
    in a shorter row over the columns behind it."""
    lines = [header, *rows]
    widths = [
        max((len(line[column]) for line in lines if column < len(line) - 1), default=0) for column in range(len(header))
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines
    )


def count(number: float) -> str:
    return f"{number:,.0f}"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def seconds(duration: float | None) -> str:
    """With two digits that matter; "-" for what is not known."""
    if duration is None:
        return "-"
    if duration < 0.0005:
        return f"{duration * 1e6:.0f} µs" if duration else "0 s"
    if duration < 1:
        return f"{duration * 1e3:.0f} ms"
    return f"{duration:.1f} s" if duration < 10 else f"{duration:.0f} s"


def age(duration: float) -> str:
    """As kubectl has it: 45s, 12m, 7h, 3d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if duration >= 2 * length:
            return f"{duration / length:.0f}{unit}"
    return f"{max(duration, 0):.0f}s"
