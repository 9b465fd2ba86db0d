"""A reader of KV events: what the router's index would know."""

from collections.abc import Iterable

from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent, Tier


def replayed(events: Iterable[KvEvent], known: Iterable[bytes] = ()) -> set[bytes]:
    """The blocks that a worker with a single tier has after `events`.

    A block stored twice or removed without being known is a bug.
    """
    known = {*known}
    for event in events:
        match event:
            case AllCleared():
                known.clear()
            case BlockStored(hashes=hashes):
                assert not known & {*hashes}, "stored twice"
                known |= {*hashes}
            case BlockRemoved(hashes=hashes):
                assert {*hashes} <= known, "removed but never stored"
                known -= {*hashes}
    return known


class TierReader:
    """What each tier has, and what device and host have together for a listener to `elsewhere` alone."""

    def __init__(self) -> None:
        self.tiers: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.anywhere: set[bytes] = set()

    def read(self, events: Iterable[KvEvent]) -> "TierReader":
        for event in events:
            match event:
                case AllCleared():
                    self.__init__()
                case BlockStored(hashes=hashes, tier=tier):
                    self._check(event)
                    self.tiers[tier] = replayed([BlockStored(hashes=hashes)], self.tiers[tier])
                case BlockRemoved(hashes=hashes, tier=tier):
                    self._check(event)
                    self.tiers[tier] = replayed([BlockRemoved(hashes=hashes)], self.tiers[tier])
            if not isinstance(event, AllCleared) and event.tier is not Tier.DISK and not event.elsewhere:
                self.anywhere = replayed([event], self.anywhere)
        return self

    def _check(self, event: BlockStored | BlockRemoved) -> None:
        """`elsewhere` says what the other of device and host has."""
        if event.tier is not Tier.DISK:
            other = self.tiers[Tier.HOST if event.tier is Tier.DEVICE else Tier.DEVICE]
            assert all((digest in other) == event.elsewhere for digest in event.hashes)
