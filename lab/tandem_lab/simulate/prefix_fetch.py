"""Prefix fetches between simulated workers, as `tandem_engine.disaggregation.prefix_fetch` does them.

    1. the requester holds what it has of the prefix and takes capacity for the rest, as far as there is any
    2. the request reaches the source, which reads it at the end of its step and holds what it still has
    3. the blocks take bytes / rate of the link; at the end of its step the source detects that they left, and releases
       them: where prompts are computed the conversation continues elsewhere, so it evicts these blocks first
    4. the digests reach the requester: the blocks join its cache, capacity for missing ones is free, and the waiting
       requests continue

A request for a prefix that is already on its way waits for that fetch. One that has waited for as long as it is worth
continues without it, and the capacity is free again.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import DisaggConfig, Role
from tandem_lab.simulate.block_cache import BlockCache
from tandem_lab.simulate.clock import EventQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTimes:
    """One kind of worker."""

    prefill_rate: float = 10_000.0
    """Prompt tokens per second (`prefill_tokens_per_s`)."""
    chunk_tokens: int = 2048
    """Max. prompt tokens of one step: decodes next to a longer prompt wait for a chunk, not for the whole prompt."""
    decode_steps: tuple[tuple[int, float], ...] = ((1, 0.010), (64, 0.030), (256, 0.080))
    """(Sequences, seconds) of a decode step (`decode_step_s`), ascending; between and beyond them linear."""
    token_bytes: float = 131_072.0
    """KV bytes of one token."""
    transfer_rate: float = 10e9
    """Bytes per second from a prefill to a decode worker (`transfer_bytes_per_s`)."""
    handoff_s: float = 0.002
    """Messages of one transfer, whatever its size."""
    fetch_s: float = 0.004
    """The same of one prefix fetch; half of them before its blocks move."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.decode_steps]
        if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ConfigError("--decode-step-ms: batch sizes must ascend from at least 1, e.g. 1:10,64:30")

    def decode_step_s(self, sequences: int) -> float:
        """Of a step in which `sequences` get a token each; 0 for none."""
        if sequences == 0:
            return 0.0
        if len(self.decode_steps) == 1:
            return self.decode_steps[0][1]
        right = bisect_left(self.decode_steps, (sequences, 0.0))
        right = min(max(right, 1), len(self.decode_steps) - 1)
        (low, low_s), (high, high_s) = self.decode_steps[right - 1 : right + 1]
        return max(1e-6, low_s + (high_s - low_s) * (sequences - low) / (high - low))

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_rate

    def step_s(self, *, prompt_tokens: int, sequences: int) -> float:
        """Of a step that computes so many prompt tokens and gives each of `sequences` a token."""
        return self.prefill_s(prompt_tokens) + self.decode_step_s(sequences)

    def exposed_transfer_s(self, tokens: int, prefill_s: float) -> float:
        """What is left after `tokens` were computed within `prefill_s`: chunks leave while others are computed."""
        total = tokens * self.token_bytes / self.transfer_rate
        last = min(tokens, self.chunk_tokens) * self.token_bytes / self.transfer_rate
        return self.handoff_s + max(last, total - prefill_s)


Callback = Callable[[], None]


class Holder(Protocol):
    """A worker that may have the prefix."""

    @property
    def cache(self) -> BlockCache: ...

    @property
    def role(self) -> Role: ...

    def turn_left_s(self) -> float:
        """Seconds until it reads its messages."""

    def wake(self) -> None:
        """Blocks have become free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedPrefix:
    """The prefix that the router selected for a fetch."""

    holder: Holder
    blocks: int
    """Leading blocks of the prompt that the holder is predicted to have."""
    within_s: float
    """It is not worth waiting for longer."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Fetch:
    holder: Holder
    prefix: Sequence[bytes]
    """What was here and what there is room for."""
    here: int
    """Blocks that were cached here when it began."""
    waiting: list[Callback]
    over: bool = False

    def brings(self, prefix: Sequence[bytes]) -> bool:
        """Whether it brings most of `prefix`, or all."""
        shared = min(len(prefix), len(self.prefix))
        return 2 * shared >= len(prefix) and self.prefix[:shared] == prefix[:shared]


@dataclass(kw_only=True, slots=True)
class PrefixFetches:
    """Those of one worker."""

    cache: BlockCache
    """The worker's own."""
    times: ServiceTimes
    block_tokens: int
    events: EventQueue
    on_cache_change: Callback
    blocks: int = 0
    """That came, since the start."""
    _under_way: list[_Fetch] = field(default_factory=list)

    def fetch(self, chain: Sequence[bytes], wanted: WantedPrefix, on_over: Callback) -> bool:
        """Bring the prefix of `chain`, or as much as there is room for. False if there is nothing to wait for:
        `on_over` is not called then."""
        prefix = chain[: wanted.blocks]
        joined = next((each for each in self._under_way if each.brings(prefix)), None)
        if joined is not None:
            joined.waiting.append(on_over)
            return True
        here = self.cache.match(prefix)
        self.cache.hold(prefix[:here])
        missing = min(len(prefix) - here, self.cache.room)
        if missing == 0:
            self.cache.release(prefix[:here])
            return False
        self.cache.take(missing)
        self.on_cache_change()
        fetch = _Fetch(holder=wanted.holder, prefix=prefix[: here + missing], here=here, waiting=[on_over])
        self._under_way.append(fetch)
        timeout_s = min(wanted.within_s, DisaggConfig().prefix_fetch_timeout)
        self.events.after(timeout_s, lambda: self._end(fetch, came=0))
        self.events.after(self.times.fetch_s / 2, lambda: self._at_turn(fetch, lambda: self._serve(fetch)))
        return True

    def _at_turn(self, fetch: _Fetch, action: Callback) -> None:
        self.events.after(fetch.holder.turn_left_s(), action)

    def _serve(self, fetch: _Fetch) -> None:
        served = fetch.prefix[: fetch.holder.cache.match(fetch.prefix)]
        came = max(0, len(served) - fetch.here)
        if fetch.over or came == 0:
            self._prove(fetch, came=0)
            return
        fetch.holder.cache.hold(served)

        def left() -> None:
            fetch.holder.cache.release(served, spent=fetch.holder.role is not Role.DECODE)
            fetch.holder.wake()
            self._prove(fetch, came=came)

        moving = came * self.block_tokens * self.times.token_bytes / self.times.transfer_rate
        self.events.after(moving, lambda: self._at_turn(fetch, left))

    def _prove(self, fetch: _Fetch, *, came: int) -> None:
        self.events.after(self.times.fetch_s / 2, lambda: self._end(fetch, came=came))

    def _end(self, fetch: _Fetch, *, came: int) -> None:
        if fetch.over:
            return
        fetch.over = True
        self._under_way.remove(fetch)
        self.cache.give_back(len(fetch.prefix) - fetch.here - came)
        known = fetch.prefix[: fetch.here + came]
        self.cache.store(known, fetch.here)
        self.cache.release(known)
        self.blocks += came
        self.on_cache_change()
        for on_over in fetch.waiting:
            on_over()
