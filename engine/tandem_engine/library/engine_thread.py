"""The scheduler loop of one engine on a thread of its own.

    1. launch   on the thread, which is the engine's from then on; the caller waits for it, or gets its error
    2. turn     what callers asked for, then one step; with nothing to do it sleeps until somebody asks
    3. end      asked to, or on an error of the engine: whoever asked is told

Callers on any thread hand over functions of the engine; nothing else crosses.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from tandem_engine.engine import Engine
from tandem_engine.errors import EngineStoppedError

logger = logging.getLogger(__name__)

T = TypeVar("T")
LONGEST_SLEEP = 0.05
"""Seconds between looks at deadlines while requests wait, as when generation is paused."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller wants done on the engine's thread."""

    function: Callable[[Engine], None]
    refuse: Callable[[EngineStoppedError], None]
    """Called instead when the engine has ended."""


class EngineThread:
    """Owns the engine between construction and `close`."""

    def __init__(
        self, launch: Callable[[], AbstractContextManager[Engine]], *, on_failure: Callable[[EngineStoppedError], None]
    ) -> None:
        """Start, and wait until the engine that `launch` opens is there. Raises what that raises.

        `on_failure` is called on the thread when the engine stops by an error of its own.
        """
        self._launch = launch
        self._on_failure = on_failure
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._stopping = False
        self._ended: EngineStoppedError | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.result()

    def ask(self, function: Callable[[Engine], None]) -> None:
        """Have `function` called between two steps; it must not raise. Forgotten when the engine ends before.

        Raises `EngineStoppedError` when it has ended.
        """
        if self._ended is not None:
            raise self._ended
        self._put(Asked(function, refuse=lambda error: None))  # noqa: ARG005

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Have `function` called between two steps; what it returns or raises is the future's.

        The future raises `EngineStoppedError` when the engine has ended.
        """
        answer: Future[T] = Future()

        def run(engine: Engine) -> None:
            try:
                answer.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - the boundary: the caller's `result()` raises it
                answer.set_exception(error)

        self._put(Asked(run, refuse=answer.set_exception))
        return answer

    def close(self) -> None:
        """End after the current step and wait for it. Idempotent."""
        self._stopping = True
        # Wakes a thread that sleeps.
        self._put(Asked(lambda engine: None, refuse=lambda error: None))  # noqa: ARG005
        self._thread.join()

    def _put(self, asked: Asked) -> None:
        self._asked.put(asked)
        # The thread may have ended since anybody looked, and would not come back for this.
        if self._ended is not None:
            self._refuse_all(self._ended)

    # On the thread.

    def _run(self) -> None:
        try:
            with self._launch() as engine:
                self._ready.set_result(None)
                self._turn_until_stopped(engine)
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                return
            logger.exception("engine stopped by an unexpected error")
            ended = EngineStoppedError(f"the engine has stopped: {type(error).__name__}: {error}")
            self._end(ended)
            self._on_failure(ended)
        else:
            self._end(EngineStoppedError("the engine was closed"))

    def _turn_until_stopped(self, engine: Engine) -> None:
        while not self._stopping:
            while not self._asked.empty():
                self._asked.get().function(engine)
            if not engine.step():
                self._sleep(engine)

    def _sleep(self, engine: Engine) -> None:
        """Until somebody asks; not for long while requests wait, for they have deadlines, or weights load."""
        try:
            asked = self._asked.get(timeout=None if engine.dormant else LONGEST_SLEEP)
        except queue.Empty:
            return
        asked.function(engine)

    def _end(self, error: EngineStoppedError) -> None:
        self._ended = error
        self._refuse_all(error)

    def _refuse_all(self, error: EngineStoppedError) -> None:
        while True:
            try:
                self._asked.get_nowait().refuse(error)
            except queue.Empty:
                return
