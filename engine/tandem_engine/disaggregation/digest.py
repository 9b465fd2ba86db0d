"""Digests of KV pages: the proof that a page arrived whole, and in the right place.

The seed of a page's digest is its place (room, generation, index within the grant), so a page that was
meant for another request, another attempt or another position never verifies even where its bytes are
intact. The sender digests before it writes, the receiver once everything has arrived.

On a CPU a page is hashed where it lies, at memory speed. A page on a device is copied to the host
first, so that both ends agree on one function whatever they run on.
"""

from collections.abc import Sequence

import xxhash

from tandem_engine.disaggregation.transport import PagePool
from tandem_engine.names import PageId


def page_digests(pool: PagePool, pages: Sequence[PageId], *, room: str, generation: int, first: int) -> tuple[int, ...]:
    """One unsigned 64-bit digest per page; `pages[i]` has index `first + i` in the grant of the room."""
    return tuple(
        xxhash.xxh3_64_intdigest(_bytes_of(pool, page), seed=_seed(room, generation, first + i))
        for i, page in enumerate(pages)
    )


def _seed(room: str, generation: int, index: int) -> int:
    return int(xxhash.xxh3_64_intdigest(f"{generation}|{index}|{room}".encode()))


def _bytes_of(pool: PagePool, page: PageId) -> memoryview:
    view = pool.page_view(page)
    return (view if view.device.type == "cpu" else view.cpu()).numpy().data
