"""The links of one worker as a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = ("PEER", "GB/s", "1 PAGE", "TRANSPORT", "AGE", "NOTE")


def links_table(links: Sequence[Mapping[str, Any]]) -> str:
    """`links` as `GET /links` answers them; fields that say nothing are absent there."""
    rows = [HEADER, *sorted(map(_row, links))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(link: Mapping[str, Any]) -> tuple[str, ...]:
    rate, latency = link.get("bytes_per_s", 0.0), link.get("latency_s", 0.0)
    notes = (link.get("condition", ""), "broken" if link.get("broken") else "", link.get("problem", ""))
    return (
        link["peer"],
        f"{rate / 1e9:.2f}" if rate else "-",
        f"{latency * 1e3:.2f} ms" if latency else "-",
        link.get("transport", "unknown"),
        f"{link.get('age_s', 0.0):.0f} s" if rate else "-",
        "; ".join(note for note in notes if note),
    )
