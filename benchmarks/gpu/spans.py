"""When a device worked, from a Chrome trace of torch's profiler."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

WORKING = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of a trace's events in which the device works."""
Span = tuple[float, float]
"""Begin and end, in microseconds."""


def spans_of(events: Sequence[dict[str, Any]]) -> list[Span]:
    """When the device worked: one for each kernel and copy."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in WORKING]


def launches_of(events: Sequence[dict[str, Any]]) -> list[Span]:
    """As `spans_of`, with all that one call of the host has started as one: a graph is a single launch, and what is
    between its kernels is no wait for the host."""
    launched: dict[object, list[Span]] = defaultdict(list)
    for number, event in enumerate(events):
        call = event.get("args", {}).get("correlation") or f"event {number}"
        launched[call] += spans_of([event])
    return [(min(span)[0], max(end for _, end in span)) for span in launched.values() if span]


def idle_share(spans: Sequence[Span]) -> float:
    """Of the middle half of a device's time: the part in which it did nothing."""
    assert spans, "the trace has no event of a device"
    first, last = min(spans)[0], max(end for _, end in spans)
    begin, end = first + (last - first) / 4, last - (last - first) / 4
    busy, reached = 0.0, begin
    for start, stop in sorted(spans):
        new = min(stop, end) - max(start, reached)
        if new > 0:
            busy += new
            reached = min(stop, end)
    return 1.0 - busy / (end - begin)


def busiest(events: Sequence[dict[str, Any]], most: int) -> list[tuple[str, float, int]]:
    """Kernels and copies by the time they took together, the longest first: name, microseconds, how often."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in WORKING:
            times[event["name"]].append(event["dur"])
    ranked = sorted(((name, sum(each), len(each)) for name, each in times.items()), key=lambda one: -one[1])
    return ranked[:most]
