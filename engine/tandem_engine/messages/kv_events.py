"""What enters and leaves a worker's prefix cache, tier by tier, for the router's index; and the chain of block hashes.

Batches carry a sequence number per incarnation. A reader that detects a gap requests a replay, which starts with
`AllCleared` and then names every block that the worker holds.

Engine events, router and gateway use one chain of block hashes:

    h[0] = BLAKE2b-128(seed(space) ‖ tokens of block 0)
    h[i] = BLAKE2b-128(h[i−1]     ‖ tokens of block i)

Tokens are little-endian uint32. A block is one KV page (`page_size` tokens); a trailing partial block has no hash.
Equal prompts in different `CacheSpace`s share nothing: a salt separates tenants, and an adapter computes other KV than
its base.
"""

import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

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


DIGEST_BYTES = 16

TOKEN_BYTES = 4
"""Of one packed token."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Tokens as the chain hashes them: `TOKEN_BYTES` little-endian bytes each. Several times faster than `struct`."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """What `pack_tokens` was given. Raises `ValueError` when `packed` is not a whole number of tokens."""
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


class CacheSpace(NamedTuple):
    """What must be equal for two requests to share cached blocks."""

    salt: str = ""
    """Of the tenant; clients choose it."""
    adapter: bytes = b""
    """Digest of the adapter, b"" for the base model."""

    @property
    def seed(self) -> bytes:
        """See `chain_seed`."""
        return chain_seed(self.salt, self.adapter)


BASE_SPACE = CacheSpace()


def chain_seed(salt: str, adapter: bytes = b"") -> bytes:
    """Parent digest of the first block. No salt that a client can choose gives the seed of an adapter: its digest is a
    separate parameter of the hash."""
    assert not adapter or (len(adapter) == DIGEST_BYTES and any(adapter)), f"{adapter!r} is no digest of an adapter"
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=DIGEST_BYTES, person=b"tandem-salt", salt=adapter).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of one block after `parent`."""
    return blake2b(parent + pack_tokens(tokens), digest_size=DIGEST_BYTES).digest()


def chain_hashes(token_ids: Sequence[int], block_size: int, *, parent: bytes) -> list[bytes]:
    """Digests of the whole blocks of `token_ids` after `parent`."""
    return chain_packed(pack_tokens(token_ids), block_size * TOKEN_BYTES, parent=parent)


def chain_packed(packed: bytes | bytearray, block_bytes: int, *, parent: bytes) -> list[bytes]:
    """`chain_hashes` of tokens that are packed already."""
    hashes = []
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        parent = blake2b(parent + packed[end - block_bytes : end], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
