"""What enters and leaves a worker's prefix cache, for the router's index.

Batches carry a sequence number per incarnation; a reader that sees a gap asks for a replay, which
starts with `AllCleared` and then names every block the worker holds.
"""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that can now be matched, parents before children. Hashes are 16 raw bytes each."""

    hashes: tuple[bytes, ...]


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    hashes: tuple[bytes, ...]


class AllCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """Forget every block of this incarnation."""


KvEvent = BlockStored | BlockRemoved | AllCleared


class KvEventBatch(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events"):
    sequence: int
    events: tuple[KvEvent, ...]
