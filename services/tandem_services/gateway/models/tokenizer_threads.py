"""Threads that tokenize, so that the event loop does not.

`TokenizerThreads` keeps conversions of texts off the event loop, except for a few brief texts in each iteration:

    call ─▶ queue of short or of long work ─▶ thread ─▶ all results so far, in one wake-up of the loop

Waking a thread and the loop costs about as much as encoding a short text. An awake thread therefore takes all queued
work and returns its results together, so the cost per call falls with load. Long work has its own threads, so that no
short text waits for it. The queue is bounded: `run` rejects work beyond it. Work is skipped if its client has
disconnected or its deadline has passed.

Brief texts beyond the time of an iteration wait for the next ones, in the order of their arrival: of a burst, the first
requests are with their workers while the last still wait.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem_engine.base.thread_pools import started_pool
from tandem_services.common.errors import unavailable
from tandem_services.gateway.limits import (
    BRIEF_TEXT_CHARACTERS,
    BRIEF_TEXTS_S,
    MAX_TOKENIZER_CHARACTERS,
    MAX_TOKENIZER_JOBS,
    SHORT_TEXT_CHARACTERS,
)

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 16
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
        except Exception as error:  # noqa: BLE001  # raised where the result is awaited
            self.error = error
        except BaseException as panic:  # noqa: BLE001  # of a tokenizer in Rust: the thread must continue
            self.error = _unconverted(panic)
            self.error.__cause__ = panic

    def deliver(self) -> None:
        """On the loop."""
        if self.answer.done():
            return
        if self.error is None:
            self.answer.set_result(self.value)
        else:
            self.answer.set_exception(self.error)


def _unconverted(panic: BaseException) -> RuntimeError:
    """For a panic of a tokenizer, which is no `Exception`."""
    return RuntimeError(f"text could not be converted: {type(panic).__name__}")


class _Line:
    """Work that waits for one of `threads`, oldest first; each takes at most `at_once`."""

    def __init__(self, threads: int, *, at_once: int, name: str) -> None:
        self._executor = started_pool(threads, name=name)
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
        # Canceled work would otherwise keep its text alive until a thread reaches it.
        with self._lock, suppress(ValueError):  # a thread has it already
            self._jobs.remove(job)

    def _work(self) -> None:
        while jobs := self._take():
            for job in jobs:
                job.run()
            loop = jobs[0].answer.get_loop()
            if loop.is_closed():
                continue  # canceled
            loop.call_soon_threadsafe(_deliver, jobs)

    def _take(self) -> list[_Job]:
        with self._lock:
            jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), self._at_once))]
            if not jobs:
                self._awake -= 1
            return jobs


@dataclass(kw_only=True)
class TokenizerThreads:
    """Those of one event loop: one for short work, `long_threads` for long. Brief work needs none of them."""

    long_threads: int
    most_jobs: int = MAX_TOKENIZER_JOBS
    most_characters: int = MAX_TOKENIZER_CHARACTERS
    jobs: int = field(default=0, init=False)
    """Waiting and running, with their `characters`."""
    characters: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._brief_s = 0.0
        """Of brief work in this iteration of the event loop."""
        self._brief_mean_s = BRIEF_TEXTS_S
        """Of one, lately."""
        self._brief: deque[asyncio.Future[None]] = deque()
        """Turns of brief work that waits for a later iteration, oldest first."""
        self._iteration_due = False
        self._short = _Line(1, at_once=MAX_AT_ONCE, name="tokenizer")
        self._long = _Line(self.long_threads, at_once=1, name="tokenizer-long")

    @property
    def waiting_turns(self) -> int:
        """Brief texts that wait for a later iteration."""
        return len(self._brief)

    async def run(self, work: Callable[[], T], *, characters: int, refusable: bool = True, brief: bool = False) -> T:
        """What `work` returns, or raises. `characters`: about how many it reads. `brief`: a few take it no time.

        Raises `ApiError` 503 when too much waits already and it is `refusable`: not the last step of what others have
        computed. Cancelled, it gives up its place.
        """
        is_brief = brief and characters <= BRIEF_TEXT_CHARACTERS
        if is_brief and not self._brief and self._brief_s < BRIEF_TEXTS_S:
            return self._run_here(work)
        # A single text is accepted whatever its length: the caller limits it.
        full = self.jobs >= self.most_jobs or self.characters + characters > self.most_characters
        if refusable and self.jobs and full:
            raise unavailable("Too many texts wait for the tokenizer. Try again later.", retry_after=RETRY_S)
        self.jobs += 1
        self.characters += characters
        try:
            if is_brief:
                await self._turn()
                return self._run_here(work)
            line = self._short if characters <= SHORT_TEXT_CHARACTERS else self._long
            return await line.run(work)
        finally:
            self.jobs -= 1
            self.characters -= characters

    def _run_here(self, work: Callable[[], T]) -> T:
        self._note_iteration()
        began = time.perf_counter()
        try:
            return work()
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise _unconverted(panic) from panic
        finally:
            took_s = time.perf_counter() - began
            self._brief_s += took_s
            self._brief_mean_s += (took_s - self._brief_mean_s) / MAX_AT_ONCE

    async def _turn(self) -> None:
        """Until brief work may run. A thread would wait for the interpreter of a busy loop, once or twice for each."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._brief.append(turn)
        self._note_iteration()
        await turn

    def _note_iteration(self) -> None:
        if not self._iteration_due:
            self._iteration_due = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        """A boundary, which the event loop calls: whatever happens, what still waits has a turn in the next one."""
        self._iteration_due, self._brief_s = False, 0.0
        try:
            self._give_turns()
        except Exception:
            logger.exception("texts that wait could not be given their turns")
        if self._brief:
            self._iteration_due = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _give_turns(self) -> None:
        """To brief work that waits, as much of it as takes the time; the loop then serves others."""
        most = int(BRIEF_TEXTS_S / max(self._brief_mean_s, BRIEF_TEXTS_S / MAX_AT_ONCE))
        for _ in range(min(len(self._brief), max(1, most))):
            turn = self._brief.popleft()
            if not turn.done():
                turn.set_result(None)

    def close(self) -> None:
        """Start no further work; no caller waits for it."""
        self._short.close()
        self._long.close()


def _deliver(jobs: list[_Job]) -> None:
    """Whatever happens to one of them, all others get their results, and none waits for nothing."""
    for job in jobs:
        try:
            job.deliver()
        except Exception as error:  # noqa: BLE001  # raised where the result is awaited
            if not job.answer.done():
                job.answer.set_exception(error)
