"""Digests of KV pages: the proof that a page arrived complete, and in the right place.

The key of a page's digest is its place (room, generation, group, index within the grant). A page that was meant for
another request, attempt or position does not verify even if its bytes are intact. The sender digests what it has
written, the receiver what has arrived; the receiver's grant states the kind:

    sampled   words of every layer and group of slots (`digest_words`): detects whatever a transfer can do to a page as
              a whole (missed, torn, stale, foreign), for about a hundredth of the time that a long transfer takes
    full      every byte (`digest_words`), so flipped bits are detected too; on a CPU it takes about as long as the
              transfer

A state is one page of a separate pool, and its digest is always full: a sequence has one, and any layer may be
missing.

Between engines with different numbers of ranks, a rank writes some heads of each page or state, and a digest is of
those heads.

Pages are read in place: on a CPU by compiled loops, on a device by Triton kernels (`device_digests`), or by torch where
Triton is missing. All agree to the bit, so each side may use another one.

A CPU digests while the caller waits. A device digests while the caller does something else: `begin` queues the work,
and the caller looks whether it is `ready`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import xxhash

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest_words import (
    full_digests_torch,
    gathered,
    sampled_digests_torch,
    sampled_rows,
)
from tandem_engine.disaggregation.packed_pages import queue_of, unpack, words_of
from tandem_engine.disaggregation.transport import DigestOrder, Digests, PagePool, Push
from tandem_engine.kernels.cpu.page_digests import Indices, Keys, full_digests, sampled_digests
from tandem_engine.memory.pool import PageLayout
from tandem_engine.messages.transfer import STATES

Digester = Callable[[Indices, Keys, int, range], Keys]
"""Digests under keys of these heads of pages with so many slots in use."""


class Making(Protocol):
    """Digests that are being made."""

    def ready(self) -> bool:
        """Whether `take` does not wait for a device. Raises what the device raised."""
        ...

    def take(self) -> tuple[int, ...]:
        """The digests."""
        ...


Maker = Callable[[DigestKind, Indices, Keys, int, range], Making]
"""Begins digests of a kind under keys of these heads of pages; of the last one so many slots are in use, or all (0)."""


class PageDigester:
    """Digests pages of one pool. Compiles its kernels when it is made: a second, once per machine."""

    def __init__(
        self, pool: PagePool, *, states: "PageDigester | None" = None, head_blocks: tuple[int, ...] = ()
    ) -> None:
        """`states`: of the pool of states that is next to `pool`. `head_blocks`: of a pool of states (`StateSlots`)."""
        self._states = states
        self._slots = pool.bytes_view() if head_blocks else None
        self._head_blocks = head_blocks
        self._heads = range(pool.layout.heads)
        words = words_of(pool)
        self._words, self._layout = words, pool.layout
        self.in_background = words.device.type != "cpu"
        """Whether digests that were begun are made while the caller does something else."""
        self._make = makers_on_device(words, pool.layout) if self.in_background else _on_cpu(words, pool.layout)

    def begin(
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
    ) -> Making:
        """Have one unsigned 64-bit digest made per page; `pages[i]` has index `first + i` in the grant of the room.

        tail   slots in use of the last of `pages`, or 0 when it is full like the others
        heads  of a page, these alone
        """
        keys = keys_of(len(pages), room, generation, first, group)
        where = np.fromiter(pages, np.int64, len(pages))
        if heads is not None and self._slots is not None:
            return _WhenTaken(partial(full_digests_of_heads, self._slots, where, keys, self._head_blocks, heads))
        return self._make(kind, where, keys, tail, self._heads if heads is None else heads)

    def begin_sent(self, push: Push) -> Making:
        """Have the pages that `push` sends digested, as they are."""
        key = push.key
        return self._of_group(key.group).begin(
            push.source,
            room=key.room,
            generation=key.generation,
            first=key.first,
            kind=DigestKind.FULL if key.group else push.digest,
            tail=push.tail,
            heads=None if push.heads is None else push.heads.source,
            group=key.group,
        )

    def begin_order(self, order: DigestOrder) -> Making:
        """Have what `order` names digested, once it is unpacked where it came so."""
        if not order.unpack:
            return self._begin_order(order)
        queue = queue_of(self._words.device)
        try:
            with queue.on():
                unpack(self._words, order.pages, self._layout, order.unpack)
            return self._begin_order(order)
        except Exception:
            # The pages may be free once the order is answered [late-write].
            queue.record().synchronize()
            raise

    def _begin_order(self, order: DigestOrder) -> Making:
        pages = self.begin(
            order.pages,
            room=order.room,
            generation=order.generation,
            first=0,
            kind=order.kind,
            tail=order.tail,
            heads=order.heads,
        )
        if not order.states:
            return pages
        states = self._of_group(STATES).begin(
            order.states,
            room=order.room,
            generation=order.generation,
            first=0,
            kind=DigestKind.FULL,
            heads=order.state_heads,
            group=STATES,
        )
        return _InTurn((pages, states))

    def _of_group(self, group: int) -> "PageDigester":
        if not group:
            return self
        assert self._states is not None, f"group {group} of an engine that has pages alone"
        return self._states


def keys_of(count: int, room: str, generation: int, first: int, group: int = 0) -> Keys:
    """The places of so many pages, from index `first` on, in the grant of the room for a group."""
    attempt = f"{generation}/{group}" if group else f"{generation}"
    origin = np.uint64(xxhash.xxh3_64_intdigest(f"{attempt}|{room}".encode()))
    return origin + np.arange(first, first + count, dtype=np.uint64)


def answer(order: DigestOrder, making: Making) -> Digests:
    """The answer to `order`, for which `making` was begun."""
    return Digests(room=order.room, generation=order.generation, digests=making.take(), group=order.group)


def unproved(order: DigestOrder) -> Digests:
    """The answer to `order` when it cannot be carried out: no page counts as what its writer sent."""
    digests = (0,) * len(order.pages + order.states)
    return Digests(room=order.room, generation=order.generation, digests=digests, group=order.group)


def full_digests_of_heads(slots: torch.Tensor, where: Indices, keys: Keys, blocks: Sequence[int], heads: range) -> Keys:
    """Of some heads of slots: uint8 [num_slots, bytes of a slot], whose runs of heads have `blocks` bytes per head.

    One copy of those heads, on the device of `slots`; the host waits for it.
    """
    held, starts = slots.shape[1] // sum(blocks), accumulate(blocks, initial=0)
    of_slot = slots[torch.from_numpy(where).to(slots.device)]
    runs = [
        of_slot[:, held * start + heads.start * size : held * start + heads.stop * size]
        for start, size in zip(starts, blocks, strict=False)
    ]
    part = torch.cat(runs, dim=1)
    words = torch.nn.functional.pad(part, (0, -part.shape[1] % torch.int64.itemsize)).view(torch.int64)
    if words.device.type == "cpu":
        out = np.empty(len(where), np.uint64)
        full_digests(words.numpy().view(np.uint64), np.arange(len(where)), keys, out)
        return out
    places = torch.from_numpy(keys.view(np.int64)).to(words.device)
    return _back(full_digests_torch(words, torch.arange(len(where), device=words.device), places))


@dataclass(frozen=True, slots=True)
class _WhenTaken:
    """Digests that are made by the caller that takes them."""

    make: Callable[[], Keys]

    def ready(self) -> bool:
        return True

    def take(self) -> tuple[int, ...]:
        return tuple(self.make().tolist())


@dataclass(frozen=True, slots=True)
class _InTurn:
    """Digests of several groups, one after the other."""

    makings: tuple[Making, ...]

    def ready(self) -> bool:
        return all(making.ready() for making in self.makings)

    def take(self) -> tuple[int, ...]:
        return tuple(digest for making in self.makings for digest in making.take())


def _when_taken(digesters: dict[DigestKind, Digester], slots: int) -> Maker:
    """Full pages and the last, partial one in turn."""

    def make(kind: DigestKind, pages: Indices, keys: Keys, tail: int, heads: range) -> Making:
        digests, full = digesters[kind], len(pages) - (tail > 0)

        def both() -> Keys:
            found = digests(pages[:full], keys[:full], slots, heads)
            return np.concatenate((found, digests(pages[full:], keys[full:], tail, heads))) if tail else found

        return _WhenTaken(both)

    return make


def _on_cpu(signed_words: torch.Tensor, layout: PageLayout) -> Maker:
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
            part = gathered(signed_words, torch.from_numpy(pages), layout, heads).numpy().view(words.dtype)
            full_digests(part, np.arange(len(pages)), keys, out)
        return out

    nothing = np.empty(0, np.int64)
    for digester in (sampled, full):
        digester(nothing, nothing.view(np.uint64), layout.slots, every_head)
    return _when_taken({DigestKind.SAMPLED: sampled, DigestKind.FULL: full}, layout.slots)


def makers_on_device(words: torch.Tensor, layout: PageLayout) -> Maker:
    """Of signed `words` [num_pages, words of a page] on a device. Whatever they launch is compiled."""
    try:
        from tandem_engine.disaggregation.device_digests import DeviceDigests
    except ImportError:
        return _by_torch(words, layout)
    return DeviceDigests(words, layout).queue


def _by_torch(words: torch.Tensor, layout: PageLayout) -> Maker:
    """The host waits for each."""
    device, every_head = words.device, range(layout.heads)

    def sent(pages: Indices, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(pages).to(device), torch.from_numpy(keys.view(np.int64)).to(device)

    def sampled(pages: Indices, keys: Keys, used: int, heads: range) -> Keys:
        rows = torch.from_numpy(sampled_rows(layout, used, heads.start)).to(device)
        return _back(sampled_digests_torch(words, *sent(pages, keys), layout, rows, len(heads)))

    def full(pages: Indices, keys: Keys, _used: int, heads: range) -> Keys:
        where, places = sent(pages, keys)
        if heads == every_head:
            return _back(full_digests_torch(words, where, places))
        part = gathered(words, where, layout, heads)
        return _back(full_digests_torch(part, torch.arange(len(pages), device=device), places))

    return _when_taken({DigestKind.SAMPLED: sampled, DigestKind.FULL: full}, layout.slots)


def _back(digests: torch.Tensor) -> Keys:
    return digests.cpu().numpy().view(np.uint64)
