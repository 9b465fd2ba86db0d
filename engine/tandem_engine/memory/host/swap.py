"""KV of retracted requests in host memory, to come back as it was.

Life of swapped KV
    1. out      host pages are taken and the copy from the device is queued; the request gives its device
                pages back at once, for whatever writes to them next runs after that copy
    2. swapped  the request has a `SwappedKv` and neither row nor device pages
    3. back     new device pages, and the copy to them is queued; forwards launched later see it
       drop     the request ended, or is computed again after all
    4. leaving  the host pages rest until every copy that was queued by then is acked [copy-acked]

Pages at the start of the request that somebody else has locked are not copied: they are expected to be in the
prefix cache when it returns. If they are not, the request is computed again.

    pages   0 ...... first_page ............... whole pages ............... the partial one
            shared   | host pages[0], host pages[1], …
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_engine.memory.copies import CopyFence, CopyQueue
from tandem_engine.memory.host.tier import HostTier
from tandem_engine.memory.page_copy import CopyKind, PageCopy
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import HostPageId


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedKv:
    """KV of tokens [first_page * page_size, committed_len), owned by one request."""

    first_page: int
    pages: tuple[HostPageId, ...]
    committed_len: int


@dataclass(kw_only=True, slots=True)
class SwapSpace:
    """Moves KV of requests between device and host. Scheduler thread only."""

    host: HostTier
    copies: CopyQueue
    leaving: CopyFence[HostPageId]

    def pages_to_move(self, kv: RequestKv, *, shared: int) -> int:
        """Pages that `out` would copy when the first `shared` stay in the cache."""
        return -(-kv.committed_len // kv.page_size) - shared

    def out(self, kv: RequestKv, *, shared: int) -> SwappedKv | None:
        """Queue the copy of the settled KV of `kv`. None, and nothing happened, if host memory has no room."""
        wanted = self.pages_to_move(kv, shared=shared)
        self.poll()
        if not self.host.make_room(wanted):
            return None
        pages = self.host.pages.take_for_swap(wanted)
        assert pages is not None, f"no {wanted} host pages after room was made for them"
        source = kv.pages[shared : shared + wanted]
        self.copies.launch(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=source, target=pages))
        return SwappedKv(first_page=shared, pages=tuple(pages), committed_len=kv.committed_len)

    def completes(self, swapped: SwappedKv, kv: RequestKv) -> bool:
        """Whether the prefix that `kv` matched reaches to where `swapped` begins."""
        return kv.matched_len >= swapped.first_page * kv.page_size

    def back(self, swapped: SwappedKv, kv: RequestKv) -> None:
        """Queue the copy of what `kv` did not find in the cache to its private pages, and commit it.

        Its slower part has been loaded back.
        """
        assert self.completes(swapped, kv), f"row {kv.row}: {kv.committed_len} tokens matched, {swapped} begins later"
        found = kv.committed_len // kv.page_size
        source = swapped.pages[found - swapped.first_page :]
        if source:
            target = kv.pages[found : found + len(source)]
            kv.copy = self.copies.launch(PageCopy(kind=CopyKind.HOST_TO_DEVICE, source=source, target=target))
        kv.committed_len = kv.computed_from = swapped.committed_len
        self.drop(swapped)

    def drop(self, swapped: SwappedKv) -> None:
        """The host pages are not needed beyond the copies that are queued now."""
        if self.leaving.needed:
            self.leaving.hold(swapped.pages)
        else:
            self.host.pages.free_swapped(swapped.pages)

    def poll(self) -> None:
        """Free what left, as far as its copies are acked."""
        if len(self.leaving):
            self.host.pages.free_swapped(self.leaving.passed())

    def leaving_pages(self) -> Iterator[HostPageId]:
        """Pages of no request that copies may still touch (audit)."""
        return iter(self.leaving)
