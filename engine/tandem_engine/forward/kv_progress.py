"""How far a step that is being computed has written KV, for senders of pages while later layers compute.

    scheduler thread                    forward thread or stream           transfer thread
    progress = KvProgress(clock)
    push pages, gated by it     ───────────────────────────────────────▶  waits
    launch step N with it       ─────▶  layer 0, `wrote(0)`      ───────▶  `layers` is 1: writes layer 0
                                        layer 1, `wrote(1)` …    ───────▶  …
    step N settles              ◀─────  `ended`, which wakes     ───────▶  writes the rest

Layers are written in order, for all tokens of the step at once. A step that raises, or is never run, is void: what
its pages hold means nothing, and a peer that sent some of it sends those pages again.

On a CPU `wrote` is called between two layers and is right at once. On a device it is called when the layer's work
is queued, with an event recorded behind it, and only the event is believed.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from tandem_engine.base.clock import Clock

ALL_LAYERS = 1 << 30
"""More than any model has: the step is over."""

VOID = -1
"""The step failed."""

Wake = Callable[[], None]


class Event(Protocol):
    """A place in the queue of a stream: `torch.cuda.Event` once it is recorded, as far as it is used here."""

    def query(self) -> bool:
        """Whether the stream got there."""
        ...


class _Queued(NamedTuple):
    layer: int
    event: Event


class KvProgress:
    """One step's progress. Written by the thread that computes, read by the one that transfers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queued: deque[_Queued] = deque()
        self._written = 0
        self._outcome: int | None = None
        self._wakes: list[Wake] = []
        self.ended_at: float | None = None
        """When the step was over, by `clock`."""

    @property
    def layers(self) -> int:
        """Layers [0, layers) of the step's tokens are in their pages. `ALL_LAYERS` once the step is over, `VOID` if
        it failed. Never blocks.
        """
        while self._queued and self._queued[0].event.query():
            self._written = self._queued.popleft().layer + 1
        return self._written if self._outcome is None else self._outcome

    def wrote(self, layer: int, behind: Event | None = None) -> None:
        """KV of `layer` is written; on a stream, as soon as that got to `behind`."""
        if behind is None:
            self._written = layer + 1
        else:
            self._queued.append(_Queued(layer, behind))

    def on_end(self, wake: Wake) -> None:
        """Have `wake` called when the step is over, at once if it is. By any thread, and perhaps twice."""
        # Added before the look: one of both threads sees the other's half.
        self._wakes.append(wake)
        if self._outcome is not None:
            wake()

    def ended(self, step: "Future[Any]") -> None:
        """A callback of the step's future: its result is on the host, or what it raised."""
        failed = step.cancelled() or step.exception() is not None
        self.ended_at = self._clock.now()
        self._outcome = VOID if failed else ALL_LAYERS
        for wake in [*self._wakes]:
            wake()
