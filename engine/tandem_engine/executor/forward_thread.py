"""Two executors around the same forward: one on a thread of its own, one in line.

On a CPU the forward thread is what a stream is on a GPU: the scheduler plans the next step while this one
computes, because torch and the compiled kernels let go of the interpreter lock.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult
from tandem_engine.memory.page_copy import Copier, CopyReport, PageCopy, refuse_copies

Forward = Callable[[ForwardBatch], ForwardResult]
T = TypeVar("T")


class ForwardThread:
    """Implements `ModelExecutor`: overlap mode. `launch` returns at once; batches run in order."""

    def __init__(self, forward: Forward, *, copier: Copier = refuse_copies, threads: int | None = None) -> None:
        """`copier` copies pages between the batches.

        `threads`: how many torch may use inside a forward; None leaves its choice.

        The number belongs to the thread that asks. Nobody else of the process should compute with more than
        one: every thread that does gets an OpenMP team of its own, and once teams outnumber the cores their
        members sleep between operations instead of being ready, which makes small steps twice as slow.
        """
        self._forward = forward
        self._copier = copier
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="forward", initializer=_use_threads, initargs=(threads,)
        )

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Raises `RuntimeError` after `shutdown`."""
        return self._thread.submit(self._run, batch)

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        """Raises `RuntimeError` after `shutdown`."""
        return self._thread.submit(self._copier, copy)

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` where forwards run, with their threads, and wait for it."""
        return self._thread.submit(function).result()

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        """Start nothing more, and do not wait for a step that may never end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, batch: ForwardBatch) -> ForwardResult:
        # Grad mode belongs to a thread, so it is set where the forward runs.
        with torch.inference_mode():
            return self._forward(batch)


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


class InlineExecutor:
    """Implements `ModelExecutor`: normal mode. `launch` returns when the step is computed."""

    def __init__(self, forward: Forward, *, copier: Copier = refuse_copies) -> None:
        self._forward = forward
        self._copier = copier

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        with torch.inference_mode():
            return _completed(lambda: self._forward(batch))

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        return _completed(lambda: self._copier(copy))

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` where forwards run: here."""
        return function()

    def shutdown(self) -> None:
        """Nothing runs between launches."""

    def abandon(self) -> None:
        """Nothing runs between launches."""


def _completed(function: Callable[[], T]) -> Future[T]:
    """Run `function` now."""
    future: Future[T] = Future()
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - the boundary: `result()` raises it, as on a thread
        future.set_exception(error)
    return future
