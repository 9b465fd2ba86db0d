"""The executor of a device with streams: nobody waits for it but whoever wants a result.

    scheduler thread                         device
    future = executor.launch(batch)   ─────▶ inputs · forward · sampling · results to the host, all queued
    … plans the next step …                  computes
    future.result()                   ◀───── the event behind the results; they are read and put together here

There is no thread beside the scheduler's: a launch costs it the queueing, and a result the reading. So a future is not
completed by anybody else: it looks at the device when it is asked, by the scheduler thread alone.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tandem_engine.executor.streams import DeviceStreams, StreamName
from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult
from tandem_engine.memory.page_copy import CopyReport, PageCopy

T = TypeVar("T")

SPIN_S = 0.002
"""For so long a look follows the other at once: small steps end sooner than a sleeping thread is awake again."""
NAP_S = 50e-6


@dataclass(frozen=True, slots=True)
class Queued(Generic[T]):
    """Something that is queued on a device."""

    arrived: Callable[[], bool]
    """Whether its results are on the host. Never waits; raises what the device raised."""
    finish: Callable[[], T]
    """The answer, once they are."""

    def then(self, change: Callable[[T], T]) -> "Queued[T]":
        """With its answer changed on the host."""
        return Queued(self.arrived, lambda: change(self.finish()))


Enqueue = Callable[[ForwardBatch], Queued[ForwardResult]]
"""Queues a step. Where it raises, nothing that was queued has a result."""
EnqueueCopy = Callable[[PageCopy], Queued[CopyReport]]


class StreamFuture(Future[T]):
    """A future that looks for itself. Scheduler thread only."""

    def __init__(self, queued: Queued[T]) -> None:
        super().__init__()
        self._queued = queued

    def done(self) -> bool:
        return super().done() or self._arrived()

    def result(self, timeout: float | None = None) -> T:
        self._complete(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._complete(timeout)
        return super().exception(0)

    def _arrived(self) -> bool:
        """Also when the device has failed: then there is nothing more to come."""
        try:
            return self._queued.arrived()
        except Exception as error:  # noqa: BLE001 - the boundary: whoever asks for the result raises it
            self.set_exception(error)
            return True

    def _complete(self, timeout: float | None) -> None:
        """Raises `TimeoutError` when it takes longer."""
        if super().done():
            return
        self._await(timeout)
        if super().done():
            return
        try:
            answer = self._queued.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self.set_exception(error)
        else:
            self.set_result(answer)

    def _await(self, timeout: float | None) -> None:
        began = time.monotonic()
        while not self._arrived():
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise TimeoutError
            time.sleep(0.0 if waited < SPIN_S else NAP_S)


class StreamExecutor:
    """Implements `ModelExecutor`. Both modes: overlap is what the loop makes of it."""

    def __init__(self, enqueue: Enqueue, *, copier: EnqueueCopy, streams: DeviceStreams) -> None:
        self._enqueue = enqueue
        self._copier = copier
        self._streams = streams
        self._closed = False

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Raises `RuntimeError` after `shutdown`."""
        self._require_open()
        return _future(lambda: self._enqueue(batch))

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        """Raises `RuntimeError` after `shutdown`."""
        self._require_open()
        return _future(lambda: self._copier(copy))

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` with the forward stream on, behind what was launched. It may wait for the device."""
        with self._streams.on(StreamName.FORWARD):
            return function()

    def shutdown(self) -> None:
        """Wait for what was launched."""
        if not self._closed:
            self._closed = True
            self._streams.synchronize()

    def abandon(self) -> None:
        """Launch nothing more, and do not wait for a step that may never end."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the executor is shut down")


def _future(enqueue: Callable[[], Queued[T]]) -> Future[T]:
    try:
        # Grad mode belongs to a thread, and the scheduler's may be a caller's own.
        with torch.inference_mode():
            return StreamFuture(enqueue())
    except Exception as error:  # noqa: BLE001 - the boundary: `result()` raises it, as on a thread
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed
