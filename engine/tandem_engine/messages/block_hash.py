"""The one chain of block hashes, used by engine events, router and gateway alike.

    h[0] = BLAKE2b-128(seed(salt) ‖ tokens of block 0)
    h[i] = BLAKE2b-128(h[i−1]     ‖ tokens of block i)

Tokens are little-endian uint32. A block is one KV page (`page_size` tokens); a trailing partial block
has no hash. The salt separates tenants: equal prompts under different salts share nothing.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

DIGEST_BYTES = 16


def chain_seed(salt: str) -> bytes:
    """Parent digest of the first block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"tandem-salt").digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of one block after `parent`."""
    return blake2b(parent + pack(f"<{len(tokens)}I", *tokens), digest_size=DIGEST_BYTES).digest()


def chain_hashes(token_ids: Sequence[int], block_size: int, *, parent: bytes) -> list[bytes]:
    """Digests of the whole blocks of `token_ids` after `parent`."""
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
