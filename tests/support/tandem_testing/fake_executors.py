"""Executors around the fake model that fix *when* a forward runs.

EagerExecutor     inside `launch`: as early as can be
LateExecutor      inside the wait for its result: as late as can be, after the scheduler has planned
                  the next step, moved rows and freed pages. What a forward reads of the scheduler's
                  state by mistake, it reads wrong
ThreadedExecutor  on a thread, after a random short delay: anything between the two
"""

import random
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult


class Faults(Protocol):
    """Called before each forward; may raise."""

    def __call__(self, batch: ForwardBatch) -> None: ...


class Computes(Protocol):
    """The fake model, or something around it."""

    def forward(self, batch: ForwardBatch) -> ForwardResult: ...


def no_faults(batch: ForwardBatch) -> None:
    """Every forward succeeds."""


class EagerExecutor:
    """Runs at launch. Keeps the batches, for tests that look at them."""

    def __init__(self, model: Computes, faults: Faults = no_faults) -> None:
        self.model = model
        self.faults = faults
        self.batches: list[ForwardBatch] = []

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        self.batches.append(batch)
        future: Future[ForwardResult] = Future()
        resolve(future, self.model, batch, self.faults)
        return future

    def shutdown(self) -> None:
        """Nothing to stop."""


class LateExecutor:
    """Runs when somebody waits, older batches first."""

    def __init__(self, model: Computes, faults: Faults = no_faults) -> None:
        self.model = model
        self.faults = faults
        self.batches: list[ForwardBatch] = []
        self._pending: deque[tuple[ForwardBatch, Future[ForwardResult]]] = deque()

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        self.batches.append(batch)
        future = LateFuture(self)
        self._pending.append((batch, future))
        return future

    def run_until(self, wanted: Future[ForwardResult]) -> None:
        while not wanted.done():
            batch, future = self._pending.popleft()
            resolve(future, self.model, batch, self.faults)

    def shutdown(self) -> None:
        """Nothing to stop."""


class LateFuture(Future[ForwardResult]):
    """Computes when asked for its outcome."""

    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> ForwardResult:
        self._executor.run_until(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._executor.run_until(self)
        return super().exception(timeout)


class ThreadedExecutor:
    """Runs on one thread of its own, each batch after up to `max_delay` seconds."""

    def __init__(self, model: Computes, *, seed: int = 0, max_delay: float = 0.0005) -> None:
        self.model = model
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._thread = ThreadPoolExecutor(max_workers=1)

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        return self._thread.submit(self._run, batch, self._random.uniform(0, self._max_delay))

    def shutdown(self) -> None:
        self._thread.shutdown()

    def _run(self, batch: ForwardBatch, delay: float) -> ForwardResult:
        time.sleep(delay)
        return self.model.forward(batch)


def resolve(future: Future[ForwardResult], model: Computes, batch: ForwardBatch, faults: Faults) -> None:
    """Run `batch` and put the outcome into `future`."""
    try:
        faults(batch)
        result = model.forward(batch)
    except Exception as error:  # noqa: BLE001 (delivered to whoever waits)
        future.set_exception(error)
    else:
        future.set_result(result)
