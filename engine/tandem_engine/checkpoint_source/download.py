"""Files of one commit, into the cache of huggingface_hub: several at a time, with one count of bytes for all.

Threads are daemons: a process that is interrupted ends at once, and the next download continues what has arrived.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from tqdm import tqdm

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.hub import Hub, NoAnswerError, quiet_hub, read_error
from tandem_engine.checkpoint_source.source import ModelSource

THREADS = 4


class Report(Protocol):
    """Shows the user what happens."""

    def say(self, line: str) -> None:
        """Show a line."""
        ...

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` bytes have arrived. Called from several threads, one at a time."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """What is fetched from where. The commit never changes, so no reference is written on the way."""

    hub: Hub
    source: ModelSource
    commit: str
    continued_by: str = ""
    """What continues a download that fails; "" for `tandem pull`."""

    def missing_bytes(self, names: Sequence[str]) -> int:
        """Of the files `names` that have yet to arrive, by a dry run. Raises `ConfigError`."""
        missing: list[int] = []

        def measure(name: str) -> None:
            info = self._call(name, dry_run=True)
            missing.append((info.file_size or 0) if info.will_download else 0)

        self._each(names, measure)
        return sum(missing)

    def fetch(self, names: Sequence[str], *, total: int, progress: Callable[[int, int], None]) -> None:
        """Return when the files `names` are in the cache; `total`: bytes that have yet to arrive.

        `progress`: as that of a `Report`.

        Raises:
            ConfigError: a file could not be fetched; what has arrived is kept.
        """
        count = _Count(total=total, progress=progress)
        with count:
            self._each(names, lambda name: self._call(name, tqdm_class=_counting(count)))

    def _call(self, name: str, **options: Any) -> Any:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(
            self.source.repo,
            name,
            revision=self.commit,
            cache_dir=self.hub.cache,
            endpoint=self.hub.endpoint,
            **options,
        )

    def _each(self, names: Sequence[str], work: Callable[[str], object]) -> None:
        with quiet_hub():
            failure = first_failure(names, work)
        if failure is not None:
            self._raise(*failure)

    def _raise(self, name: str, error: Exception) -> NoReturn:
        meaning = read_error(error, self.hub, self.source)
        if isinstance(meaning, NoAnswerError):
            raise ConfigError(
                f"{self.source.repo}: the download of {name} failed, because {self.hub.name} {meaning}; what has "
                f"arrived is kept, and {self.continued_by or f'`tandem pull {self.source.text}`'} continues it"
            ) from error
        raise meaning from error


def first_failure(names: Sequence[str], work: Callable[[str], object]) -> tuple[str, Exception] | None:
    """`work` of each name, several at a time: the name and the error of the first that fails, None if all are done.

    After a failure nothing further begins; downloads under way continue in daemon threads.
    """
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()
    for name in names:
        todo.put(name)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = todo.get_nowait()
                try:
                    work(name)
                except Exception as error:  # noqa: BLE001  returned to the thread that waits
                    ended.put((name, error))
                else:
                    ended.put((name, None))

    for _ in range(min(THREADS, len(names))):
        threading.Thread(target=run, name="hub-download", daemon=True).start()
    for _ in names:
        name, error = ended.get()
        if error is not None:
            _empty(todo)
            return name, error
    return None


def _empty(jobs: "queue.SimpleQueue[str]") -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            jobs.get_nowait()


class _StoppedError(Exception):
    """The download has failed in another thread, or its user has interrupted it."""


@dataclass(kw_only=True, slots=True)
class _Count:
    """Bytes that have arrived, of all files. After the block of `with`, threads that still download end."""

    total: int
    progress: Callable[[int, int], None]
    _done: int = 0
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        """`size` is negative when a server begins a file again."""
        with self._lock:
            if self._stopped:
                raise _StoppedError
            self._done += size
            self.progress(min(self._done, self.total), self.total)

    def __enter__(self) -> "_Count":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True


def _counting(count: _Count) -> type:
    """What huggingface_hub makes for each file to report its bytes to."""

    class Counting(tqdm):  # type: ignore[type-arg]  # generic for type checkers alone
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            count.add(int(options.get("initial") or 0))

        def update(self, n: float | None = 1) -> None:
            count.add(int(n or 0))

    return Counting
