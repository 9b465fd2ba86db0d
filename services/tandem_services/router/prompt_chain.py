"""The chain of block digests of a prompt, computed without holding up the event loop.

A digest follows from the one before it, so nothing of it can be left out or done side by side: 0.6 µs a block, which is
a millisecond for 32k tokens and tens of them for the longest prompts. Others have their turn after every slice of it.
A prompt that is asked for again, while it waits for room, is not hashed again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.messages.block_hash import chain_hashes, chain_seed

SLICE_BLOCKS = 512
"""Hashed in a third of a millisecond."""


async def prompt_chain(token_ids: Sequence[int], page_size: int, *, salt: str, most_blocks: int) -> list[bytes]:
    """Digests of the first whole pages of a prompt, at most `most_blocks`."""
    blocks = min(len(token_ids) // page_size, most_blocks)
    chain: list[bytes] = []
    parent = chain_seed(salt)
    for first in range(0, blocks, SLICE_BLOCKS):
        if first:
            await asyncio.sleep(0)
        last = min(first + SLICE_BLOCKS, blocks)
        chain += chain_hashes(token_ids[first * page_size : last * page_size], page_size, parent=parent)
        parent = chain[-1]
    return chain


@dataclass(slots=True)
class LastChain:
    """`prompt_chain` that keeps what it has computed last."""

    _token_ids: Sequence[int] = ()
    _hashed_as: tuple[int, str, int] = (0, "", 0)
    _chain: list[bytes] = field(default_factory=list)

    async def of(self, token_ids: Sequence[int], page_size: int, *, salt: str, most_blocks: int) -> list[bytes]:
        """As `prompt_chain`; not to be changed, nor are `token_ids`, which are known by their identity."""
        hashed_as = (page_size, salt, most_blocks)
        if token_ids is self._token_ids and hashed_as == self._hashed_as:
            return self._chain
        chain = await prompt_chain(token_ids, page_size, salt=salt, most_blocks=most_blocks)
        self._token_ids, self._hashed_as, self._chain = token_ids, hashed_as, chain
        return chain
