"""Storage in memory whose reads and writes end when a test says so, or at the next question."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from tandem_engine.memory.host.storage import Fetched, PutReport


class MemoryStorage:
    """Implements `HostStorage`. Nothing happens before `run`, which each question about content calls."""

    def __init__(self, *, at_once: bool = True) -> None:
        """`at_once`: operations are done when the call returns; else when the test calls `run`."""
        self.pages: dict[bytes, bytes] = {}
        self.lost: set[bytes] = set()
        """Keys that a `get` will not find, although they seem to be there."""
        self.at_once = at_once
        self._pending: list[Callable[[], None]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.pages

    def __len__(self) -> int:
        return len(self.pages)

    def hashes(self) -> Iterator[bytes]:
        return iter([*self.pages])

    def put(self, key: bytes, page: memoryview) -> Future[PutReport]:
        future: Future[PutReport] = Future()

        def write() -> None:
            self.pages[key] = bytes(page)
            future.set_result(PutReport(stored=True))

        self._begin(write)
        return future

    def get(self, key: bytes, page: memoryview) -> Future[Fetched]:
        future: Future[Fetched] = Future()

        def read() -> None:
            content = None if key in self.lost else self.pages.get(key)
            if content is not None:
                page[:] = content
                future.set_result(Fetched.WHOLE)
            else:
                future.set_result(Fetched.ABSENT if self.pages.pop(key, None) is None else Fetched.LOST)

        self._begin(read)
        return future

    def run(self) -> None:
        """Do everything that was asked for."""
        pending, self._pending = self._pending, []
        for operation in pending:
            operation()

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        self.run()

    def _begin(self, operation: Callable[[], None]) -> None:
        self._pending.append(operation)
        if self.at_once:
            self.run()
