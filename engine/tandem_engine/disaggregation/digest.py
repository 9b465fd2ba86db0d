"""Digests of KV pages: the proof that a page arrived whole, and in the right place.

The seed of a page's digest is its place (room, generation, index within the grant), so a page that was
meant for another request, another attempt or another position does not verify even where its bytes are
intact. The sender digests before it writes, the receiver once everything has arrived.

On a CPU a page is hashed where it lies, at memory speed. A page on a device is copied to the host
first, so that both ends agree on one function whatever they run on.
"""

from collections.abc import Callable, Sequence

import xxhash

from tandem_engine.disaggregation.transport import PagePool
from tandem_engine.names import PageId

WORD = 2**64


class PageDigester:
    """Digests pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self._read = _reader(pool)

    def digest(self, pages: Sequence[PageId], *, room: str, generation: int, first: int) -> tuple[int, ...]:
        """One unsigned 64-bit digest per page; `pages[i]` has index `first + i` in the grant of the room."""
        origin = xxhash.xxh3_64_intdigest(f"{generation}|{room}".encode())
        return tuple(
            xxhash.xxh3_64_intdigest(self._read(page), seed=(origin + index) % WORD)
            for index, page in enumerate(pages, start=first)
        )


def _reader(pool: PagePool) -> Callable[[PageId], memoryview]:
    """A function from a page to its bytes: in place on a CPU, a copy from a device."""
    everything = pool.bytes_view()
    if everything.device.type != "cpu":
        return lambda page: everything[page].cpu().numpy().data
    # Slicing one buffer costs a tenth of indexing a tensor, which would show with small pages.
    buffer, size = everything.numpy().reshape(-1).data, pool.page_bytes
    return lambda page: buffer[page * size : (page + 1) * size]
