"""Anchors of requests: where each begins, and at which lengths its state is copied for others.

1. aim       it begins at an anchor, if it found one, and the lengths at which others may continue are set
2. moves     a step is launched: it copies anchors to rows that begin, and states of rows to slots, pending
             provisional anchors last, where slots are left for them
3. attach    the step has settled and the cache has the pages: pending copies become anchors
   drop      the request ends, or its steps count for nothing: what is pending is given back
"""

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from tandem_engine.forward.batch import Snapshot
from tandem_engine.memory.request_kv import PendingAnchor, RequestKv
from tandem_engine.memory.state_anchors import StateAnchors


class StateMoves(NamedTuple):
    """See `ForwardBatch`."""

    copies: tuple[tuple[int, int], ...] = ()
    snapshots: tuple[Snapshot, ...] = ()


NO_MOVES = StateMoves()


TRIALS = (12, 8, 14, 4, 10, 15, 6, 13, 2, 1)
"""Sixteenths of what the cache lacks of a prompt, after which a provisional state is kept; the first of them where
slots are short. So another prompt with the same beginning computes at most an eighth of this one again, and less near
its end; up to a grain more, as lengths are rounded down, and up to `TRIAL_DISTANCE` and a grain of a short prompt."""

TRIAL_DISTANCE = 128
"""Tokens between a provisional anchor and any other."""


def aim(kv: RequestKv, anchors: StateAnchors, *, tokens: int, known: int) -> None:
    """Continue from the anchor that was found, and copy the state where others may continue: before the last token of
    `tokens`, and where these leave what is cached, which is `known` tokens. Provisional anchors also between these
    two."""
    if kv.pages and not (kv.slower is not None and kv.slower.has_state):
        kv.continues_from = kv.pages[-1]
        anchors.pin(kv.continues_from)
    aims = {anchors.at_most(known), anchors.at_most(tokens - 1)}
    kv.anchor_lens = sorted(length for length in aims if length > kv.committed_len)
    kv.trial_lens = _trials_between(known, tokens, anchors)
    kv.aimed_len = max(aims)


def _trials_between(known: int, tokens: int, anchors: StateAnchors) -> list[int]:
    """Lengths of provisional anchors, in the order in which they get slots."""
    others = [anchors.at_most(known), anchors.at_most(tokens - 1)]
    chosen: list[int] = []
    for share in TRIALS:
        length = anchors.at_most(known + (tokens - known) * share // 16)
        if all(abs(length - other) >= TRIAL_DISTANCE for other in (*others, *chosen)):
            chosen.append(length)
    return chosen


def moves_of_step(
    anchors: StateAnchors, step: int, kvs: Sequence[RequestKv], starts: Sequence[int], stops: Sequence[int]
) -> StateMoves:
    """What `step`, which computes tokens [start, stop) of each of `kvs`, copies.

    Anchors that requests begin with are read before any slot is given to another one.
    """
    reads = [(_leave_anchor(kv, anchors, used=True), int(kv.row)) for kv in kvs if kv.continues_from is not None]
    spans = [*zip(kvs, starts, stops, strict=True)]
    kept: list[Snapshot] = []
    for sequence, (kv, start, stop) in enumerate(spans):
        for length in _lengths_to_keep(kv, anchors, start, stop):
            slot = _slot_for(kv, anchors)
            if slot is not None:
                kept.append(Snapshot(sequence, length, slot))
                kv.pending_anchors.append(PendingAnchor(length, slot, step))
    for sequence, (kv, _, stop) in enumerate(spans):
        for length in [each for each in kv.trial_lens if each < stop]:
            kv.trial_lens.remove(length)
            slot = anchors.take(provisional=True)
            if slot is not None:
                kept.append(Snapshot(sequence, length, slot))
                insort(kv.pending_anchors, PendingAnchor(length, slot, step))
    writes = [(int(kvs[each.sequence].row), each.slot) for each in kept if each.length == starts[each.sequence]]
    snapshots = sorted(each for each in kept if each.length > starts[each.sequence])
    return StateMoves((*reads, *writes), tuple(snapshots))


def attach_anchors(kv: RequestKv, anchors: StateAnchors, *, settled: int) -> None:
    """Those whose pages the cache has. A step after `settled` may yet turn out to have copied nothing."""
    pending = kv.pending_anchors
    while pending and pending[0].length <= kv.cache_protected_len and pending[0].step <= settled:
        anchor = pending.pop(0)
        anchors.attach(kv.pages[anchor.length // kv.page_size - 1], anchor.slot)


def drop_anchors(kv: RequestKv, anchors: StateAnchors) -> None:
    """The one that it continues from, and those that are pending."""
    if kv.continues_from is not None:
        _leave_anchor(kv, anchors, used=False)
    for anchor in kv.pending_anchors:
        anchors.give_back(anchor.slot)
    kv.pending_anchors.clear()


def _leave_anchor(kv: RequestKv, anchors: StateAnchors, *, used: bool) -> int:
    assert kv.continues_from is not None, f"row {kv.row} continues from no anchor"
    page, kv.continues_from = kv.continues_from, None
    return anchors.unpin(page, used=used)


def _lengths_to_keep(kv: RequestKv, anchors: StateAnchors, start: int, stop: int) -> list[int]:
    """Of its states before or within a step that computes tokens [start, stop)."""
    if start > kv.aimed_len:
        return [start] if start % anchors.grain == 0 else []
    lengths = [length for length in kv.anchor_lens if length < stop]
    del kv.anchor_lens[: len(lengths)]
    return lengths


def _slot_for(kv: RequestKv, anchors: StateAnchors) -> int | None:
    """Of one more of its pending anchors. A decode keeps its newest state alone."""
    if kv.pending_anchors and kv.pending_anchors[-1].length > kv.aimed_len:
        return kv.pending_anchors.pop().slot
    return anchors.take()
