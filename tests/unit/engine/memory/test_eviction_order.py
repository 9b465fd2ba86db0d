"""The recency list against the definition of least recently used, page by page [evict-without-scan]."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.base.names import PageId
from tandem_engine.memory.prefix_cache import Lock
from tandem_engine.memory.radix_cache import RadixCache

Key = tuple[int, ...]


@dataclass
class PlainCache:
    """Page size 1 without a tree: every prefix is an entry, and its last use is when its last lock went."""

    last_use: dict[Key, int] = field(default_factory=dict)
    locks: dict[Key, int] = field(default_factory=dict)
    page: dict[Key, PageId] = field(default_factory=dict)
    time: int = 0

    def lock(self, key: Key) -> None:
        for end in range(1, len(key) + 1):
            self.locks[key[:end]] = self.locks.get(key[:end], 0) + 1

    def unlock(self, key: Key, *, spent: bool) -> None:
        self.time += 1
        for end in range(1, len(key) + 1):
            self.locks[key[:end]] -= 1
            self.last_use[key[:end]] = self.time
        end = len(key)
        while spent and end and self.locks[key[:end]] == 0 and not self._continues_elsewhere(key, end):
            self.last_use[key[:end]] = -self.time  # before everything that is there
            end -= 1

    def _continues_elsewhere(self, key: Key, end: int) -> bool:
        return any(len(other) == end + 1 and other[:end] == key[:end] != other != key[: end + 1] for other in self.page)

    def evict(self, n: int) -> list[PageId]:
        """Oldest first; of one path the deepest first."""
        unlocked = [key for key in self.page if self.locks.get(key, 0) == 0]
        order = sorted(unlocked, key=lambda key: (self.last_use[key], -len(key)))
        return [self.page.pop(key) for key in order[:n]]


operations = st.one_of(
    st.tuples(st.sampled_from(["insert", "match"]), st.lists(st.integers(0, 2), max_size=5).map(tuple)),
    st.tuples(st.sampled_from(["unlock", "unlock spent", "evict"]), st.integers(0, 3)),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(operations, max_size=40))
def test_pages_leave_in_the_order_of_their_last_use(script: list[tuple[str, Key | int]]) -> None:
    cache, plain = RadixCache(1), PlainCache()
    locks: list[tuple[Lock, Key]] = []
    next_page = 1
    for verb, argument in script:
        match verb, argument:
            case "insert", tuple() as key:
                offered = [PageId(next_page + i) for i in range(len(key))]
                next_page += len(key)
                result = cache.insert(key, offered)
                plain.page |= {key[: i + 1]: page for i, page in enumerate(result.pages)}
                plain.lock(key)
                locks.append((result.lock, key))
            case "match", tuple() as key:
                found = cache.match(key)
                matched = key[: len(found.pages)]
                assert list(found.pages) == [plain.page[key[: i + 1]] for i in range(len(matched))]
                assert key[: len(matched) + 1] not in plain.page or matched == key
                plain.lock(matched)
                locks.append((found.lock, matched))
            case (("unlock" | "unlock spent"), int() as index) if locks:
                lock, key = locks.pop(index % len(locks))
                cache.unlock(lock, spent=verb == "unlock spent")
                plain.unlock(key, spent=verb == "unlock spent")
            case "evict", int() as count:
                assert sorted(cache.evict(count)) == sorted(plain.evict(count))
        assert cache.audit(lock for lock, _ in locks) == []
