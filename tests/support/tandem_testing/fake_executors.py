"""Executors around the fake model that fix *when* a forward or a page copy runs.

EagerExecutor     inside `launch`: as early as can be
LateExecutor      inside the wait for its result: as late as can be, after the scheduler has planned
                  the next step, moved rows and freed pages. What a forward reads of the scheduler's
                  state by mistake, it reads wrong. Copies run with the next forward that is waited
                  for; without a wait, when their end has been polled `MAX_POLLS` times
ThreadedExecutor  on a thread, after a random short delay: anything between the two
"""

import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.memory.page_copies import Copier, CopyReport, PageCopy

MAX_POLLS = 2
T = TypeVar("T")


class Faults(Protocol):
    """Called before each forward; may raise."""

    def __call__(self, batch: ForwardBatch) -> None: ...


class Computes(Protocol):
    """The fake model, or something around it."""

    def forward(self, batch: ForwardBatch) -> ForwardResult: ...

    @property
    def copy(self) -> Copier: ...


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Implements `Computes` from its parts."""

    forward: Callable[[ForwardBatch], ForwardResult]
    copy: Copier


def no_faults(batch: ForwardBatch) -> None:
    """Every forward succeeds."""


class EagerExecutor:
    """Runs at launch. Keeps the batches, for tests that look at them."""

    def __init__(self, model: Computes, faults: Faults = no_faults) -> None:
        self.model = model
        self.faults = faults
        self.batches: list[ForwardBatch] = []
        self.copies: list[PageCopy] = []

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        self.batches.append(batch)
        future: Future[ForwardResult] = Future()
        resolve(future, self.model, batch, self.faults)
        return future

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        self.copies.append(copy)
        future: Future[CopyReport] = Future()
        future.set_result(self.model.copy(copy))
        return future

    def shutdown(self) -> None:
        """Nothing to stop."""


class LateExecutor:
    """Runs when its result is waited for, older work first."""

    def __init__(self, model: Computes, faults: Faults = no_faults) -> None:
        self.model = model
        self.faults = faults
        self.batches: list[ForwardBatch] = []
        self.copies: list[PageCopy] = []
        self._pending: deque[Callable[[], None]] = deque()

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        self.batches.append(batch)
        future: LateFuture[ForwardResult] = LateFuture(self)
        self._pending.append(lambda: resolve(future, self.model, batch, self.faults))
        return future

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        self.copies.append(copy)
        future = LateCopy(self)
        self._pending.append(lambda: future.set_result(self.model.copy(copy)))
        return future

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._pending.popleft()()

    def shutdown(self) -> None:
        """Nothing to stop."""


class LateFuture(Future[T], Generic[T]):
    """Computes when asked for its outcome."""

    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> T:
        self._executor.run_until(super().done)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._executor.run_until(super().done)
        return super().exception(timeout)


class LateCopy(LateFuture[CopyReport]):
    """A copy is polled and not waited for, so one that is polled again and again runs by itself."""

    def __init__(self, executor: LateExecutor) -> None:
        super().__init__(executor)
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        if self._asked > MAX_POLLS:
            self._executor.run_until(super().done)
        return super().done()


class ThreadedExecutor:
    """Runs on one thread of its own, each batch or copy after up to `max_delay` seconds."""

    def __init__(self, model: Computes, *, seed: int = 0, max_delay: float = 0.0005) -> None:
        self.model = model
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._thread = ThreadPoolExecutor(max_workers=1)

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        return self._thread.submit(self._run, self._delay(), lambda: self.model.forward(batch))

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        return self._thread.submit(self._run, self._delay(), lambda: self.model.copy(copy))

    def shutdown(self) -> None:
        self._thread.shutdown()

    def _delay(self) -> float:
        return self._random.uniform(0, self._max_delay)

    def _run(self, delay: float, work: Callable[[], T]) -> T:
        time.sleep(delay)
        return work()


def resolve(future: Future[ForwardResult], model: Computes, batch: ForwardBatch, faults: Faults) -> None:
    """Run `batch` and put the outcome into `future`."""
    try:
        faults(batch)
        result = model.forward(batch)
    except Exception as error:  # noqa: BLE001 (delivered to the waiting caller)
        future.set_exception(error)
    else:
        future.set_result(result)
