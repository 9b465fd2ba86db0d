"""Which rank of a writer sends which KV heads to which rank of a receiver.

    4 KV heads, writer with 2 ranks            receiver with 4 ranks

    rank 0   heads 0 1  ──── head 0 ─────────▶ rank 0   head 0
                        ╰─── head 1 ─────────▶ rank 1   head 1
    rank 1   heads 2 3  ──── head 2 ─────────▶ rank 2   head 2
                        ╰─── head 3 ─────────▶ rank 3   head 3

Each rank's pages hold a run of the model's heads (`parallel.split`). Where heads are fewer than ranks, neighbours hold
the same one: every receiver that holds it gets it, from one sender, and the receivers are shared out among the senders
in order. So with equally many ranks on both sides rank i writes whole pages to rank i.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from tandem_engine.disaggregation.transport import HeadPart
from tandem_engine.parallel.split import OUTPUTS, share_of


class HeadSlice(NamedTuple):
    """What one rank of the writer sends to one rank of the receiver, of every page."""

    sender: int
    receiver: int
    part: HeadPart
    """Counted within either rank's page."""


def heads_on(kv_heads: int, *, rank: int, size: int) -> range:
    """Those of the model's `kv_heads` heads that rank `rank` of `size` holds."""
    part = OUTPUTS.part(kv_heads, rank=rank, size=size)
    return range(part.start, part.stop)


def can_hold(kv_heads: int, size: int) -> bool:
    """Whether `size` ranks can hold that many heads evenly."""
    return size >= 1 and share_of(kv_heads, size) is not None


@lru_cache(maxsize=64)
def head_slices(kv_heads: int, *, senders: int, receivers: int) -> tuple[HeadSlice, ...]:
    """All slices of a page, in order of receiver, then of head. Every head of every receiver is in exactly one."""
    return tuple(
        one
        for receiver in range(receivers)
        for one in _slices_of(receiver, kv_heads, senders=senders, receivers=receivers)
    )


def _slices_of(receiver: int, kv_heads: int, *, senders: int, receivers: int) -> Iterator[HeadSlice]:
    target = heads_on(kv_heads, rank=receiver, size=receivers)

    def sender_of(head: int) -> int:
        having = _holders(kv_heads, head, senders)
        wanting = _holders(kv_heads, head, receivers)
        return having[wanting.index(receiver) * len(having) // len(wanting)]

    for sender, heads in groupby(target, sender_of):
        run = [*heads]
        source = heads_on(kv_heads, rank=sender, size=senders)
        part = HeadPart(_within(source, run), _within(target, run))
        yield HeadSlice(sender=sender, receiver=receiver, part=part)


def _holders(kv_heads: int, head: int, size: int) -> list[int]:
    return [rank for rank in range(size) if head in heads_on(kv_heads, rank=rank, size=size)]


def _within(held: range, run: list[int]) -> range:
    start = run[0] - held.start
    return range(start, start + len(run))
