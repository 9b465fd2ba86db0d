"""Two executors around the same forward: one runs it on a separate thread, one in line.

On a CPU the forward thread is what a stream is on a GPU: the scheduler plans the next step while this one
computes, because torch and the compiled kernels release the interpreter lock.
"""

import logging
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from tandem_engine.base.linux import bind_thread
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.memory.page_copies import Copier, CopyReport, PageCopy, refuse_copies

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], ForwardResult]
T = TypeVar("T")

TURN_S = 2e-4
"""For so long one thread may keep the interpreter while another waits for it; Python's own 5 ms are longer than
planning a step takes. A forward acquires it between any two operations and would wait until planning is over, so
the time that overlap saves would be lost within the step."""


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """Something to run, and the future of its result."""

    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: `result` raises it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class ForwardThread:
    """Implements `ModelExecutor`: overlap mode. `launch` returns at once; batches run in order.

    The loop is its own because its gap between two steps is time that no forward uses: a pool of one thread
    from `concurrent.futures` does twice the work there, with the scheduler awake and waiting for the
    interpreter lock.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        copier: Copier = refuse_copies,
        threads: int | None = None,
        cpus: Collection[int] = (),
    ) -> None:
        """`copier` copies pages between the batches.

        `threads`: how many torch may use inside a forward; None leaves its choice. `cpus`: cores that they stay on;
        the thread that schedules goes wherever there is room.

        The number belongs to the calling thread. No other thread of the process should compute with more than
        one: every thread that does gets an OpenMP team of its own, and once teams outnumber the cores their
        members sleep between operations instead of being ready, which makes small steps twice as slow.

        Shortens the process's switch interval to `TURN_S`.
        """
        self._forward = forward
        self._copier = copier
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._closing = False
        sys.setswitchinterval(min(TURN_S, sys.getswitchinterval()))
        # The interpreter should not wait at exit for a forward whose owner did not.
        self._thread = threading.Thread(target=self._serve, args=(threads, cpus), name="forward", daemon=True)
        self._thread.start()

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Raises `RuntimeError` after `shutdown`."""
        return self._submit(lambda: self._compute(batch))

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        """Raises `RuntimeError` after `shutdown`."""
        return self._submit(lambda: self._copier(copy))

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` where forwards run, with their threads, and wait for it."""
        return self._submit(function).result()

    def shutdown(self) -> None:
        """Run what is queued, then end."""
        self._close()
        self._thread.join()

    def abandon(self) -> None:
        """Start nothing more, and do not wait for a step that may never end."""
        while (task := self._take()) is not None:
            task.future.cancel()
        self._close()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        task = Task(function)
        self._tasks.put(task)
        # Looked at afterwards: a thread that fails closes itself before it cancels what is queued.
        if self._closing or not self._thread.is_alive():
            raise RuntimeError("the forward thread is shut down")
        return task.future

    def _close(self) -> None:
        if not self._closing:
            self._closing = True
            self._tasks.put(None)

    def _take(self) -> Task[Any] | None:
        """The next task that has not begun, if there is one."""
        try:
            return self._tasks.get_nowait()
        except Empty:
            return None

    def _serve(self, threads: int | None, cpus: Collection[int]) -> None:
        task: Task[Any] | None = None
        try:
            # Before the team is started: its threads stay where the one is that starts them.
            bind_thread(cpus)
            if threads is not None:
                torch.set_num_threads(threads)
            while (task := self._tasks.get()) is not None:
                task.run()
                # Waiting for the next one must not keep tensors of this one.
                task = None
        except BaseException as error:
            # No other thread completes futures, and a wait for one has no deadline.
            self._closing = True
            logger.exception("the forward thread failed")
            if task is not None and not task.future.done():
                task.future.set_exception(error)
            while not self._tasks.empty():
                if (waiting := self._tasks.get()) is not None:
                    waiting.future.cancel()

    def _compute(self, batch: ForwardBatch) -> ForwardResult:
        # Grad mode belongs to a thread, so it is set where the forward runs.
        with torch.inference_mode():
            return self._forward(batch)


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
