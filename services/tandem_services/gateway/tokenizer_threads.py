"""Threads that turn text into ids and ids into text: the event loop never does.

    asked for ─▶ line of short or of long work ─▶ thread ─▶ what it has done meanwhile, in one wake-up of the loop

Waking a thread, and the loop by it, costs about as much as encoding a short text, so a thread that is awake takes
whatever has come in the meantime and answers all of it at once: the busier the gateway, the cheaper each hop. Long work
has threads of its own, so that no short text waits behind one that takes a second.

What waits is bounded: beyond it `run` refuses. Work whose client has left, or whose deadline has passed, is skipped.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem_services.common.errors import unavailable
from tandem_services.gateway.limits import (
    MAX_TOKENIZER_CHARACTERS,
    MAX_TOKENIZER_JOBS,
    SHORT_TEXT_CHARACTERS,
)

MOST_AT_ONCE = 16
"""Short pieces of work that are answered together: about a millisecond's worth of the usual ones."""
RETRY_S = 1.0

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    answer: "asyncio.Future[Any]"
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        if self.answer.cancelled():
            return
        try:
            self.value = self.work()
        except Exception as error:  # noqa: BLE001  # raised where it was asked for
            self.error = error

    def deliver(self) -> None:
        """On the loop."""
        if self.answer.done():
            return
        if self.error is None:
            self.answer.set_result(self.value)
        else:
            self.answer.set_exception(self.error)


class _Line:
    """Work that waits for one of `threads`, oldest first; each takes at most `at_once`."""

    def __init__(self, threads: int, *, at_once: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._at_once = at_once
        self._jobs: deque[_Job] = deque()
        self._awake = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(work, answer)
        self._put(job)
        try:
            return await answer
        except asyncio.CancelledError:
            self._drop(job)
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _put(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._awake == self._threads:
                return
            self._awake += 1
        self._executor.submit(self._work)

    def _drop(self, job: _Job) -> None:
        # What nobody waits for any more would keep its text alive until a thread comes to it.
        with self._lock, suppress(ValueError):  # a thread has it already
            self._jobs.remove(job)

    def _work(self) -> None:
        while jobs := self._take():
            for job in jobs:
                job.run()
            loop = jobs[0].answer.get_loop()
            if loop.is_closed():
                continue  # nobody waits any more
            loop.call_soon_threadsafe(_deliver, jobs)

    def _take(self) -> list[_Job]:
        with self._lock:
            jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), self._at_once))]
            if not jobs:
                self._awake -= 1
            return jobs


@dataclass(kw_only=True)
class TokenizerThreads:
    """Those of one event loop: one for short work, `long_threads` for long."""

    long_threads: int
    most_jobs: int = MAX_TOKENIZER_JOBS
    most_characters: int = MAX_TOKENIZER_CHARACTERS
    jobs: int = field(default=0, init=False)
    """Waiting and running, with their `characters`."""
    characters: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._short = _Line(1, at_once=MOST_AT_ONCE, name="tokenizer")
        self._long = _Line(self.long_threads, at_once=1, name="tokenizer-long")

    async def run(self, work: Callable[[], T], *, characters: int, refusable: bool = True) -> T:
        """What `work` returns, or raises. `characters`: about how many it reads.

        Raises `ApiError` 503 when too much waits already and it is `refusable`: not the last step of what others have
        computed. Cancelled, it gives up its place.
        """
        # Whatever its length, a single text is taken: who may send it is the caller's business.
        full = self.jobs >= self.most_jobs or self.characters + characters > self.most_characters
        if refusable and self.jobs and full:
            raise unavailable("Too many texts wait for the tokenizer. Try again later.", retry_after=RETRY_S)
        self.jobs += 1
        self.characters += characters
        try:
            line = self._short if characters <= SHORT_TEXT_CHARACTERS else self._long
            return await line.run(work)
        finally:
            self.jobs -= 1
            self.characters -= characters

    def close(self) -> None:
        """Nothing is run any more that has not begun; nobody waits for it."""
        self._short.close()
        self._long.close()


def _deliver(jobs: list[_Job]) -> None:
    for job in jobs:
        job.deliver()
