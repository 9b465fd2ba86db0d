"""Which blocks of a long prompt a routing call names: every so many, and the last one."""

from collections.abc import Sequence

from tandem_services.router.keys import DIGEST_BYTES, MAX_NAMED_BLOCKS


def named_blocks(chain: bytes) -> bytes:
    """Digests of the blocks of `chain` that a routing call names."""
    blocks = len(chain) // DIGEST_BYTES
    if named_step(blocks) == 1:
        return chain
    return b"".join([chain[(end - 1) * DIGEST_BYTES : end * DIGEST_BYTES] for end in named_positions(blocks)])


def named_positions(blocks: int) -> Sequence[int]:
    """Of a prompt of so many blocks; the first block is number 1."""
    step = named_step(blocks)
    return range(1, blocks + 1) if step == 1 else (*range(step, blocks, step), blocks)


def named_step(blocks: int) -> int:
    """The least power of two by which at most `MAX_NAMED_BLOCKS` of a prompt's blocks are named.

    A power of two, so that prompts of different lengths with a common prefix name the same blocks of it.
    """
    return 1 << max(0, (blocks - 1) // MAX_NAMED_BLOCKS).bit_length()
