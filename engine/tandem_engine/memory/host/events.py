"""KV events of several tiers in one order."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from tandem_engine.messages.kv_events import BlockRemoved, BlockStored, KvEvent, Tier

Marked: TypeAlias = tuple[bytes, bool]
"""A block hash, and whether the other of device and host has the block too."""


@dataclass(kw_only=True, slots=True)
class TierEvents:
    """What happened since somebody last took it."""

    _events: list[KvEvent] = field(default_factory=list)

    def stored(self, tier: Tier, blocks: Iterable[Marked]) -> None:
        for elsewhere, hashes in _runs(blocks):
            self._events.append(BlockStored(hashes=hashes, tier=tier, elsewhere=elsewhere))

    def removed(self, tier: Tier, blocks: Iterable[Marked]) -> None:
        for elsewhere, hashes in _runs(blocks):
            self._events.append(BlockRemoved(hashes=hashes, tier=tier, elsewhere=elsewhere))

    def take(self) -> list[KvEvent]:
        taken, self._events = self._events, []
        return taken


def _runs(blocks: Iterable[Marked]) -> Iterable[tuple[bool, tuple[bytes, ...]]]:
    """Neighbours that are marked alike, in order."""
    for elsewhere, run in groupby(blocks, key=itemgetter(1)):
        yield elsewhere, tuple(digest for digest, _ in run)
