"""What the host does for a step on a device: an engine whose graphs compute nothing, and a count of Python calls."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from tandem_engine.executor.platform import OnStreams
from tandem_testing.plain_device import PlainStreams
from tandem_testing.turning_reference import TurningReference

T = TypeVar("T")


class Still:
    """A graph that leaves its results as they are."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class StillCapturer:
    """Implements `GraphCapturer`."""

    def __init__(self) -> None:
        self.graphs: list[Still] = []

    def new_pool(self) -> None:
        pass

    def capture(self, run: Callable[[], T]) -> tuple[Still, T]:
        self.graphs.append(Still())
        return self.graphs[-1], run()


class StillDevice(OnStreams):
    """A `Platform` whose steps cost the host what they cost it on a GPU, kernels launched without a graph apart."""

    def __init__(self) -> None:
        self.capturer = StillCapturer()
        super().__init__(
            streams=PlainStreams(),
            capturer=self.capturer,
            attention=lambda pool, _heads, specs, _dtype: TurningReference(pool, specs=specs),
        )

    @property
    def replays(self) -> int:
        """Of all graphs."""
        return sum(graph.replays for graph in self.capturer.graphs)


def python_calls(run: Callable[[], object]) -> int:
    """Functions of Python that `run` enters, generators each time they resume."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls
