"""Digests of KV pages: the proof that a page arrived complete, and in the right place.

The key of a page's digest is its place (room, generation, group, index within the grant). A page that was meant for
another request, attempt or position does not verify even if its bytes are intact. The sender digests what it has
written, the receiver what has arrived; the receiver's grant states the kind:

    sampled   words of every layer and group of slots (`digest_words`): detects whatever a transfer can do to a page as
              a whole (missed, torn, stale, foreign), for about a hundredth of the time that a long transfer takes
    full      every byte (`digest_words`), so flipped bits are detected too; on a CPU it takes about as long as the
              transfer

A state is one page of a pool of its own, and its digest is always full: a sequence has one, and any layer may be
missing.

Between engines with different numbers of ranks, a rank writes some heads of each page, and a digest is of those heads.

Pages are read in place: on a CPU by compiled loops, on a device by Triton kernels (`digest_triton`), or by torch where
Triton is missing. All agree to the bit, so each side may use another one.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest_words import (
    full_digests_torch,
    sampled_digests_torch,
    sampled_rows,
    word_bytes,
)
from tandem_engine.disaggregation.transport import DigestOrder, Digests, PagePool, Push
from tandem_engine.kernels.cpu.page_digests import SLOT_GROUP, Indices, Keys, full_digests, sampled_digests
from tandem_engine.memory.pool import PageLayout
from tandem_engine.messages.transfer import STATES

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

Digester = Callable[[Indices, Keys, int, range], Keys]
"""Digests under keys of these heads of pages with so many slots in use."""


class PageDigester:
    """Digests pages of one pool. Compiles its kernels when it is made: a second, once per machine."""

    def __init__(self, pool: PagePool, *, states: "PageDigester | None" = None) -> None:
        """`states`: of the pool of states that is next to `pool`."""
        self._states = states
        self._slots, self._heads = pool.layout.slots, range(pool.layout.heads)
        words = pool.bytes_view().view(WORD_TYPES[word_bytes(pool.layout)])
        make = _on_cpu if words.device.type == "cpu" else digesters_on_device
        self._by_kind = make(words, pool.layout)

    def digest(
        self,
        pages: Sequence[PageId],
        *,
        room: str,
        generation: int,
        first: int,
        kind: DigestKind = DigestKind.SAMPLED,
        tail: int = 0,
        heads: range | None = None,
        group: int = 0,
    ) -> tuple[int, ...]:
        """One unsigned 64-bit digest per page; `pages[i]` has index `first + i` in the grant of the room.

        tail   slots in use of the last of `pages`, or 0 when it is full like the others
        heads  of a page, these alone
        """
        attempt = f"{generation}/{group}" if group else f"{generation}"
        origin = np.uint64(xxhash.xxh3_64_intdigest(f"{attempt}|{room}".encode()))
        keys = origin + np.arange(first, first + len(pages), dtype=np.uint64)
        where = np.fromiter(pages, np.int64, len(pages))
        digests, full = self._by_kind[kind], len(pages) - (tail > 0)
        part = self._heads if heads is None else heads
        found = digests(where[:full], keys[:full], self._slots, part).tolist()
        if tail:
            found += digests(where[full:], keys[full:], tail, part).tolist()
        return tuple(found)

    def sent(self, push: Push) -> tuple[int, ...]:
        """Digests of the pages that `push` sends, as they are now."""
        key = push.key
        return self._of_group(key.group).digest(
            push.source,
            room=key.room,
            generation=key.generation,
            first=key.first,
            kind=DigestKind.FULL if key.group else push.digest,
            tail=push.tail,
            heads=None if push.heads is None else push.heads.source,
            group=key.group,
        )

    def carry_out(self, order: DigestOrder) -> Digests:
        """The answer to `order`."""
        digests = self.digest(
            order.pages,
            room=order.room,
            generation=order.generation,
            first=0,
            kind=order.kind,
            tail=order.tail,
            heads=order.heads,
        )
        if order.states:
            digests += self._of_group(STATES).digest(
                order.states,
                room=order.room,
                generation=order.generation,
                first=0,
                kind=DigestKind.FULL,
                group=STATES,
            )
        return Digests(room=order.room, generation=order.generation, digests=digests)

    def _of_group(self, group: int) -> "PageDigester":
        if not group:
            return self
        assert self._states is not None, f"group {group} of an engine that has pages alone"
        return self._states


def unproved(order: DigestOrder) -> Digests:
    """The answer to `order` when it cannot be carried out: no page counts as what its writer sent."""
    return Digests(room=order.room, generation=order.generation, digests=(0,) * len(order.pages + order.states))


def _on_cpu(signed_words: torch.Tensor, layout: PageLayout) -> dict[DigestKind, Digester]:
    words = signed_words.numpy().view(f"u{signed_words.dtype.itemsize}")
    row_words = words.shape[1] // layout.rows
    every_row, every_head = sampled_rows(layout, layout.slots), range(layout.heads)

    def sampled(pages: Indices, keys: Keys, used: int, heads: range) -> Keys:
        whole = used == layout.slots and heads == every_head
        rows = every_row if whole else sampled_rows(layout, used, heads.start)
        out = np.empty(len(pages), np.uint64)
        sampled_digests(words, pages, keys, rows, layout.parts, layout.heads, layout.slots, row_words, len(heads), out)
        return out

    def full(pages: Indices, keys: Keys, _used: int, heads: range) -> Keys:
        out = np.empty(len(pages), np.uint64)
        if heads == every_head:
            full_digests(words, pages, keys, out)
        else:
            part = _gathered(signed_words, torch.from_numpy(pages), layout, heads).numpy().view(words.dtype)
            full_digests(part, np.arange(len(pages)), keys, out)
        return out

    nothing = np.empty(0, np.int64)
    for digester in (sampled, full):
        digester(nothing, nothing.view(np.uint64), layout.slots, every_head)
    return {DigestKind.SAMPLED: sampled, DigestKind.FULL: full}


def digesters_on_device(words: torch.Tensor, layout: PageLayout) -> dict[DigestKind, Digester]:
    """Of signed `words` [num_pages, words of a page] on a device. Whatever they launch is compiled."""
    device, every_head = words.device, range(layout.heads)
    sampled_on: Callable[..., torch.Tensor]
    try:
        from tandem_engine.disaggregation import digest_triton as device_digests
    except ImportError:
        sampled_on, full_on = sampled_digests_torch, full_digests_torch
    else:
        sampled_on, full_on = device_digests.sampled_digests, device_digests.full_digests

    def sent(pages: Indices, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(pages).to(device), torch.from_numpy(keys.view(np.int64)).to(device)

    def sampled(pages: Indices, keys: Keys, used: int, heads: range) -> Keys:
        rows = torch.from_numpy(sampled_rows(layout, used, heads.start)).to(device)
        if heads == every_head:
            return _back(sampled_on(words, *sent(pages, keys), layout, rows))
        return _back(sampled_digests_torch(words, *sent(pages, keys), layout, rows, len(heads)))

    def full(pages: Indices, keys: Keys, _used: int, heads: range) -> Keys:
        where, places = sent(pages, keys)
        if heads == every_head:
            return _back(full_on(words, where, places))
        part = _gathered(words, where, layout, heads)
        return _back(full_on(part, torch.arange(len(pages), device=device), places))

    _warm_up(sampled, full, layout, words.shape[1])
    return {DigestKind.SAMPLED: sampled, DigestKind.FULL: full}


def _warm_up(sampled: Digester, full: Digester, layout: PageLayout, page_words: int) -> None:
    """No transfer waits for a compiler: digest a page as far as any request may fill it, and as any peer may share it.

    A kernel is compiled for each number of samples, and for whether words are a multiple of 16 (see
    `device_digests.full_kernel`), as those of a page and of some of its heads may be or not.
    """
    page, every_head = np.zeros(1, np.int64), range(layout.heads)
    for used in range(min(SLOT_GROUP, layout.slots), layout.slots + SLOT_GROUP, SLOT_GROUP):
        sampled(page, page.view(np.uint64), min(used, layout.slots), every_head)
    parts = {page_words // layout.heads * count % 16 == 0: range(count) for count in range(1, layout.heads + 1)}
    for heads in parts.values():
        full(page, page.view(np.uint64), layout.slots, heads)


def _gathered(words: torch.Tensor, pages: torch.Tensor, layout: PageLayout, heads: range) -> torch.Tensor:
    """A copy [n, words of these heads] of some heads of `pages` [n]: they do not lie in one run."""
    by_head = words.view(words.shape[0], layout.layers * layout.parts, layout.heads, -1)
    return by_head[pages, :, heads.start : heads.stop].reshape(len(pages), -1)


def _back(digests: torch.Tensor) -> Keys:
    return digests.cpu().numpy().view(np.uint64)
