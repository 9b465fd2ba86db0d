"""Slices of a transfer between engines with several ranks: which heads each rank sends, and what the slices amount to.

    4 KV heads, writer with 2 ranks            receiver with 4 ranks

    rank 0   heads 0 1  ──── head 0 ─────────▶ rank 0   head 0
                        ╰─── head 1 ─────────▶ rank 1   head 1
    rank 1   heads 2 3  ──── head 2 ─────────▶ rank 2   head 2
                        ╰─── head 3 ─────────▶ rank 3   head 3

Each rank's pages hold a run of the model's heads (`parallel.sharding`). Where heads are fewer than ranks, neighbors
hold the same one: every receiver that holds it gets it from one sender, and receivers are divided among the senders in
order. So with equally many ranks on both sides rank i writes whole pages to rank i.

    sender    a push ends when each of its slices has; it has failed if one has (`JoinedPush`)
    both      a page's digest is one of the digests of its slices, in the order of the plan (`JoinedProof`)

States are divided by key heads, which no two ranks share. Between unequal numbers of ranks they have slices of their
own: ranks that hold the same KV head hold different states.

Every rank gets the reports of all ranks in the same order, and so reaches the same result.

NIXL and the digests need names:

    agent   incarnation#rank                         of an engine with one rank: its incarnation
    room    sender/senders>receiver/receivers|room   one slice of the pages of a room

A slice's room names both ranks and the numbers of ranks of both sides, so its digests are bound to its place
(`digest`), and reports about it identify the slice.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import xxhash

from tandem_engine.disaggregation.base import RoomKey
from tandem_engine.disaggregation.transport import Digests, HeadPart, PushDone, PushFailed, PushKey
from tandem_engine.messages.transfer import MAX_RANKS, STATES
from tandem_engine.parallel.sharding import OUTPUTS, share_of


class HeadSlice(NamedTuple):
    """What one rank of the writer sends to one rank of the receiver, of every page."""

    sender: int
    receiver: int
    part: HeadPart
    """Counted within either rank's page."""


def heads_on(kv_heads: int, *, rank: int, size: int) -> range:
    """Those of the model's `kv_heads` heads that rank `rank` of `size` holds."""
    part = OUTPUTS.part(kv_heads, rank=rank, size=size)
    return range(part.start, part.stop)


def can_hold(kv_heads: int, size: int) -> bool:
    """Whether `size` ranks can hold that many heads evenly."""
    return size >= 1 and share_of(kv_heads, size) is not None


@lru_cache(maxsize=64)
def head_slices(kv_heads: int, *, senders: int, receivers: int) -> tuple[HeadSlice, ...]:
    """All slices of a page, in order of receiver, then of head. Every head of every receiver is in exactly one."""
    return tuple(
        one
        for receiver in range(receivers)
        for one in _slices_of(receiver, kv_heads, senders=senders, receivers=receivers)
    )


def _slices_of(receiver: int, kv_heads: int, *, senders: int, receivers: int) -> Iterator[HeadSlice]:
    target = heads_on(kv_heads, rank=receiver, size=receivers)

    def sender_of(head: int) -> int:
        having = _holders(kv_heads, head, senders)
        wanting = _holders(kv_heads, head, receivers)
        return having[wanting.index(receiver) * len(having) // len(wanting)]

    for sender, heads in groupby(target, sender_of):
        run = [*heads]
        source = heads_on(kv_heads, rank=sender, size=senders)
        part = HeadPart(_within(source, run), _within(target, run))
        yield HeadSlice(sender=sender, receiver=receiver, part=part)


def _holders(kv_heads: int, head: int, size: int) -> list[int]:
    return [rank for rank in range(size) if head in heads_on(kv_heads, rank=rank, size=size)]


def _within(held: range, run: list[int]) -> range:
    start = run[0] - held.start
    return range(start, start + len(run))


class Route(NamedTuple):
    """From which rank to which."""

    sender: int
    receiver: int

    @classmethod
    def of(cls, one: HeadSlice) -> "Route":
        return cls(one.sender, one.receiver)


def joined_digests(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """One digest per page of the digests [slices][pages] of its slices."""
    by_page = np.array(parts, dtype="<u8").T
    return tuple(xxhash.xxh3_64_intdigest(page.tobytes()) for page in by_page)


@dataclass(kw_only=True, slots=True)
class JoinedPush:
    """A push of which several ranks write a part each, to several ranks."""

    key: PushKey
    slices: tuple[HeadSlice, ...]
    _done: dict[Route, PushDone] = field(default_factory=dict)
    _failed: dict[Route, PushFailed] = field(default_factory=dict)

    def ended(self, route: Route, event: PushDone | PushFailed) -> PushDone | PushFailed | None:
        """One slice has ended. What has become of the push, once all have."""
        if isinstance(event, PushDone):
            self._done[route] = event
        else:
            self._failed[route] = event
        if len(self._done) + len(self._failed) < len(self.slices):
            return None
        return self._failure() if self._failed else self._success()

    def _failure(self) -> PushFailed:
        first = next(iter(self._failed.values()))
        lost = any(event.peer_lost for event in self._failed.values())
        return PushFailed(key=self.key, reason=first.reason, peer_lost=lost)

    def _success(self) -> PushDone:
        digests = joined_digests([self._done[Route.of(one)].digests for one in self.slices])
        return PushDone(key=self.key, digests=digests, seconds=max(event.seconds for event in self._done.values()))


@dataclass(kw_only=True, slots=True)
class JoinedProof:
    """Digests of granted pages, of which every rank has some heads, and of states where those are in other slices."""

    key: RoomKey
    slices: tuple[HeadSlice, ...]
    state_slices: tuple[HeadSlice, ...] = ()
    """Empty: the digests of `slices` are of states, too, if there are any."""
    _parts: dict[tuple[int, Route], tuple[int, ...]] = field(default_factory=dict)
    """By group."""

    def add(self, route: Route, part: Digests) -> Digests | None:
        """One slice is digested. The digests of pages, then those of states, once all are."""
        self._parts[part.group, route] = part.digests
        if len(self._parts) < len(self.slices) + len(self.state_slices):
            return None
        digests = self._joined(0, self.slices) + self._joined(STATES, self.state_slices)
        return Digests(room=self.key.room, generation=self.key.generation, digests=digests)

    def _joined(self, group: int, slices: tuple[HeadSlice, ...]) -> tuple[int, ...]:
        return joined_digests([self._parts[group, Route.of(one)] for one in slices]) if slices else ()


_ROOM = re.compile(
    r"(?P<sender>\d{1,3})/(?P<senders>\d{1,3})>(?P<receiver>\d{1,3})/(?P<receivers>\d{1,3})\|(?P<room>.+)",
    re.DOTALL | re.ASCII,
)


class SliceRoom(NamedTuple):
    """One rank's writes to another in one room."""

    room: str
    sender: int
    senders: int
    receiver: int
    receivers: int


def agent_name(incarnation: str, *, rank: int, ranks: int) -> str:
    return incarnation if ranks == 1 else f"{incarnation}#{rank}"


def slice_room(name: SliceRoom) -> str:
    return f"{name.sender}/{name.senders}>{name.receiver}/{name.receivers}|{name.room}"


def read_slice_room(text: str) -> SliceRoom | None:
    """None for what `slice_room` would not have written."""
    found = _ROOM.fullmatch(text)
    if found is None:
        return None
    sender, senders, receiver, receivers = (int(found[n]) for n in ("sender", "senders", "receiver", "receivers"))
    if not (sender < senders <= MAX_RANKS and receiver < receivers <= MAX_RANKS):
        return None
    return SliceRoom(found["room"], sender, senders, receiver, receivers)
