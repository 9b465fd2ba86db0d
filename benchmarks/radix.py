"""The prefix cache alone: match and insert of a long prompt, chunks, eviction, by the size of the tree.

    python benchmarks/radix.py [--tokens 1000000] [--prompt 32768] [--page-size 16]

Prints one JSON object.

    match_insert_ms   what admission and settlement of one prompt cost the scheduler: `match`, then `extend` by
                      what was not cached; with nothing, half and all of the prompt cached. Limit: 2 ms at 32k
                      tokens, page 16, 1M cached tokens
    events_ms         hashing the stored blocks for the router, when a listener takes the events
    chunk_us          `extend` by one chunk of 512 tokens, for the first and the last chunk of the prompt: the
                      same, because a request continues from the node that it has locked
    evict_us_per_page eviction of 64 pages at a time from trees of growing size: flat, because the oldest leaf is
                      at the head of a list

Medians of repeated runs on trees of conversations: 64 system prompts of 1k tokens, each continued many times.
"""

import argparse
import json
import random
import time
from array import array
from collections.abc import Callable
from statistics import median

from tandem_engine.base.names import PageId
from tandem_engine.memory.radix_cache import RadixCache

VOCAB = 150_000
SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS = 64, 1024, 1024
CHUNK = 512
REPEATS = 15


def tokens(count: int, dice: random.Random) -> tuple[int, ...]:
    return tuple(token % VOCAB for token in array("I", dice.randbytes(4 * count)))


class Tree:
    """A cache filled with conversations, and unused page numbers."""

    def __init__(self, cached_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.dice = random.Random(cached_tokens)
        self.cache = RadixCache(page_size)
        self.pages = 1
        systems = [tokens(SYSTEM_TOKENS, self.dice) for _ in range(SYSTEM_PROMPTS)]
        while self.cache.evictable_pages() * page_size < cached_tokens:
            self.store((*self.dice.choice(systems), *tokens(TURN_TOKENS, self.dice)))
        self.cache.take_events()

    def new_pages(self, count: int) -> list[PageId]:
        self.pages += count
        return [PageId(page) for page in range(self.pages - count, self.pages)]

    def store(self, prompt: tuple[int, ...]) -> None:
        whole = len(prompt) // self.page_size
        self.cache.unlock(self.cache.insert(prompt, self.new_pages(whole)).lock)


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def match_insert(tree: Tree, length: int, cached: int) -> tuple[float, float]:
    """One prompt of `length` tokens whose first `cached` the tree has: its milliseconds, and those of its events."""
    prompt = tokens(length, tree.dice)
    if cached:
        tree.store(prompt[:cached])
        tree.cache.take_events()
    pages = tree.new_pages(length // tree.page_size)

    def admit_and_settle() -> None:
        match = tree.cache.match(prompt, max_tokens=length - 1)
        found = len(match.pages)
        inserted = tree.cache.extend(match.lock, prompt[found * tree.page_size :], pages[found:])
        tree.cache.unlock(inserted.lock)

    spent = milliseconds(admit_and_settle)
    return spent, milliseconds(tree.cache.take_events)


def chunk_times(tree: Tree, length: int) -> list[float]:
    """Microseconds of each chunk of one prompt."""
    prompt, times = tokens(length, tree.dice), []
    lock = tree.cache.match(prompt).lock
    for start in range(0, length, CHUNK):
        chunk, pages = prompt[start : start + CHUNK], tree.new_pages(CHUNK // tree.page_size)
        began = time.perf_counter()
        lock = tree.cache.extend(lock, chunk, pages).lock
        times.append((time.perf_counter() - began) * 1e6)
    tree.cache.unlock(lock)
    return times


def eviction(cached_tokens: int, page_size: int) -> float:
    """Microseconds per page, their events included, until half of the tree is gone."""
    tree = Tree(cached_tokens, page_size)
    pages = tree.cache.evictable_pages() // 2

    def evict_half() -> None:
        for _ in range(pages // 64):
            tree.cache.evict(64)

    return milliseconds(evict_half) * 1e3 / pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="cached tokens (default 1000000)")
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens of the prompt (default 32768)")
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()

    tree = Tree(args.tokens, args.page_size)
    cases = {"nothing cached": 0, "half cached": args.prompt // 2, "all cached": args.prompt}
    runs = {name: [match_insert(tree, args.prompt, cached) for _ in range(REPEATS)] for name, cached in cases.items()}
    chunks = [chunk_times(tree, args.prompt) for _ in range(REPEATS)]
    report = {
        "cached_tokens": args.tokens,
        "prompt_tokens": args.prompt,
        "page_size": args.page_size,
        "match_insert_ms": {name: round(median(spent for spent, _ in each), 3) for name, each in runs.items()},
        "events_ms": {name: round(median(spent for _, spent in each), 3) for name, each in runs.items()},
        "chunk_us": {
            "first": round(median(times[0] for times in chunks), 1),
            "last": round(median(times[-1] for times in chunks), 1),
        },
        "evict_us_per_page": {
            str(size): round(eviction(size, args.page_size), 2) for size in (10_000, 100_000, 1_000_000)
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
