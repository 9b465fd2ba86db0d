"""What enters and leaves a worker's prefix cache, tier by tier, for the router's index.

Batches carry a sequence number per incarnation; a reader that sees a gap asks for a replay, which
starts with `AllCleared` and then names every block the worker holds.
"""

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where a block is held."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that can now be matched in `tier`, parents before children. Hashes are 16 raw bytes each."""

    hashes: tuple[bytes, ...]
    tier: Tier = Tier.DEVICE
    elsewhere: bool = False
    """Device and host only: the other of the two has them already, so whether the worker has them is as before."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """Blocks that left `tier`."""

    hashes: tuple[bytes, ...]
    tier: Tier = Tier.DEVICE
    elsewhere: bool = False
    """Device and host only: the other of the two keeps them."""


class AllCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """Forget every block of this incarnation."""


KvEvent = BlockStored | BlockRemoved | AllCleared


class KvEventBatch(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events"):
    sequence: int
    events: tuple[KvEvent, ...]
