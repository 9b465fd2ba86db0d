"""Slices of a transfer, put together again: what counts is what all of them have come to.

    sender    a push ends when each of its slices has; it has failed if one has
    both      a page's digest is one of the digests of its slices, in the order of the plan (`head_plan`)

Every rank hears what all have to say, in the same order, and so comes to the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from tandem_engine.disaggregation.ranks.head_plan import HeadSlice
from tandem_engine.disaggregation.room_key import RoomKey
from tandem_engine.disaggregation.transport import Digests, PushDone, PushFailed, PushKey


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
    """Digests of granted pages, of which every rank has some heads."""

    key: RoomKey
    slices: tuple[HeadSlice, ...]
    _parts: dict[Route, tuple[int, ...]] = field(default_factory=dict)

    def add(self, route: Route, digests: tuple[int, ...]) -> Digests | None:
        """One slice is digested. The pages' digests, once all are."""
        self._parts[route] = digests
        if len(self._parts) < len(self.slices):
            return None
        digests = joined_digests([self._parts[Route.of(one)] for one in self.slices])
        return Digests(room=self.key.room, generation=self.key.generation, digests=digests)
