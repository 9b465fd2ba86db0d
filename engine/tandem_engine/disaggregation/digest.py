"""Digests of KV pages: the proof that a page arrived whole, and in the right place.

The key of a page's digest is its place (room, generation, index within the grant), so a page that was meant for
another request, another attempt or another position does not verify even where its bytes are intact. The sender
digests what it has written, the receiver what has arrived; which kind it is says the receiver's grant.

    sampled   words of every layer and group of slots (`sampled_words`): sees whatever a transfer can do to a page
              as a whole, missed, torn, stale, foreign, for a hundredth of the time the transfer takes
    full      every byte, so that flipped bits are seen too; costs about half as much as the transfer

On a CPU pages are read where they lie. Full digests of pages on a device are made of a copy on the host, sampled
ones on the device.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from tandem_engine.disaggregation.sampled_words import Keys, sampled_digests, sampled_digests_torch, word_bytes
from tandem_engine.disaggregation.transport import PagePool
from tandem_engine.names import DigestKind, PageId

_WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
Digester = Callable[[Sequence[PageId], Keys], tuple[int, ...]]


class PageDigester:
    """Digests pages of one pool. Compiles its kernel when it is made: a second, once per machine."""

    def __init__(self, pool: PagePool) -> None:
        self._by_kind: dict[DigestKind, Digester] = {
            DigestKind.SAMPLED: _sampled_digester(pool),
            DigestKind.FULL: _full_digester(pool),
        }

    def digest(
        self, pages: Sequence[PageId], *, room: str, generation: int, first: int, kind: DigestKind = DigestKind.SAMPLED
    ) -> tuple[int, ...]:
        """One unsigned 64-bit digest per page; `pages[i]` has index `first + i` in the grant of the room."""
        origin = np.uint64(xxhash.xxh3_64_intdigest(f"{generation}|{room}".encode()))
        keys = origin + np.arange(first, first + len(pages), dtype=np.uint64)
        return self._by_kind[kind](pages, keys)


def _sampled_digester(pool: PagePool) -> Digester:
    layout = pool.layout
    words = pool.bytes_view().view(_WORD_TYPES[word_bytes(layout)])
    if words.device.type != "cpu":
        return lambda pages, keys: _on_device(words, pages, keys, pool)
    unsigned = words.numpy().view(f"u{words.dtype.itemsize}")

    def digest(pages: Sequence[PageId], keys: Keys) -> tuple[int, ...]:
        out = np.empty(len(pages), np.uint64)
        where = np.fromiter(pages, np.int64, len(pages))
        sampled_digests(unsigned, where, keys, layout.layers, layout.heads, layout.slots, out)
        return tuple(out.tolist())

    digest((), np.empty(0, np.uint64))
    return digest


def _on_device(words: torch.Tensor, pages: Sequence[PageId], keys: Keys, pool: PagePool) -> tuple[int, ...]:
    where = torch.tensor(pages, dtype=torch.int64, device=words.device)
    places = torch.from_numpy(keys.view(np.int64)).to(words.device)
    found = sampled_digests_torch(words, where, places, pool.layout).cpu().numpy()
    return tuple(found.view(np.uint64).tolist())


def _full_digester(pool: PagePool) -> Digester:
    read = _reader(pool)

    def digest(pages: Sequence[PageId], keys: Keys) -> tuple[int, ...]:
        return tuple(
            xxhash.xxh3_64_intdigest(read(page), seed=key) for page, key in zip(pages, keys.tolist(), strict=True)
        )

    return digest


def _reader(pool: PagePool) -> Callable[[PageId], memoryview]:
    """A function from a page to its bytes: in place on a CPU, a copy from a device."""
    everything = pool.bytes_view()
    if everything.device.type != "cpu":
        return lambda page: everything[page].cpu().numpy().data
    # Slicing one buffer costs a tenth of indexing a tensor, which would show with small pages.
    buffer, size = everything.numpy().reshape(-1).data, pool.page_bytes
    return lambda page: buffer[page * size : (page + 1) * size]
