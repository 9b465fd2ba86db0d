"""The audit: every page and every row has exactly one owner.

A page is in exactly one of five sets, each collected from its owner and never derived from a sum [page-conservation]:

    free (fenced ones included) · tree · private to a request · transfer hold · dummy page 0

and a host page in one of four: free · cached block · swapped request · leaving (`host.memory`).

Cheap enough to run after every step in tests, and always when idle.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem_engine.base.names import DUMMY_PAGE, PADDING_ROW, PageId, ReqPoolIdx
from tandem_engine.memory.allocator import each_once
from tandem_engine.memory.host.memory import HostReport
from tandem_engine.memory.host.tier import SwappedKv
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv

NAMED = 5
"""Pages or rows that one sentence lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConservationReport:
    """Sizes of the sets, and sentences about what does not add up."""

    free: int
    """Fenced pages included."""
    fenced: int
    tree: int
    private: int
    held: int
    requests: int
    host: HostReport
    """All zero without host memory."""
    problems: tuple[str, ...]


def check_conservation(
    memory: KvMemory,
    kvs: Iterable[RequestKv],
    held: Iterable[PageId],
    swapped: Iterable[SwappedKv] = (),
    *,
    held_rows: Sequence[ReqPoolIdx] = (),
) -> ConservationReport:
    """`kvs` and `swapped`: of every live request. `held` and `held_rows`: of holds, that no request owns. Changes
    nothing.
    """
    live = [*kvs]
    host = HostReport() if memory.host is None else memory.host.audit(swapped)
    claims = {
        "the free list": [*memory.allocator.free_page_ids()],
        "the tree": [*memory.cache.pages()],
        "a request": [page for kv in live for page in kv.private_pages],
        "a transfer hold": [*held],
        "the dummy": [DUMMY_PAGE],
    }
    free, tree, private, holds, _ = claims.values()
    return ConservationReport(
        free=len(free),
        fenced=memory.allocator.fenced_pages,
        tree=len(tree),
        private=len(private),
        held=len(holds),
        requests=len(live),
        host=host,
        problems=(
            *host.problems,
            *_page_problems(claims, memory.allocator.num_pages),
            *_row_problems(memory, live, held_rows),
            *_request_problems(memory, live, {*tree}),
            *_window_problems(memory, live, tree=tree, pending=[*free, *holds]),
            *_anchor_problems(memory, live, tree=tree),
            *memory.cache.audit([*(kv.lock for kv in live if kv.lock is not None), *(pin.lock for pin in memory.pins)]),
        ),
    )


def _page_problems(claims: dict[str, list[PageId]], num_pages: int) -> list[str]:
    if each_once(claims.values(), num_pages):
        return []
    counts = Counter(page for pages in claims.values() for page in pages)
    problems = []
    if lost := [page for page in range(num_pages) if page not in counts]:
        problems.append(f"{_listed('page', lost)} leaked: no set has it")
    if alien := sorted(page for page in counts if not 0 <= page < num_pages):
        problems.append(f"{_listed('page', alien)} outside the pool of {num_pages}")
    for page in sorted(page for page, count in counts.items() if count > 1)[:NAMED]:
        owners = [owner for owner, pages in claims.items() for claimed in pages if claimed == page]
        problems.append(f"page {page} has {len(owners)} owners: {' and '.join(owners)}")
    return problems


def _row_problems(memory: KvMemory, live: Sequence[RequestKv], held: Sequence[ReqPoolIdx]) -> list[str]:
    in_use = {*memory.rows.in_use()}
    claimed = Counter([*(kv.row for kv in live), *held])
    problems = []
    if lost := sorted(in_use - claimed.keys()):
        problems.append(f"{_listed('row', lost)} leaked: no request or hold has it")
    if stale := sorted(claimed.keys() - in_use):
        problems.append(f"{_listed('row', stale)} free but still used by a request or hold")
    if shared := sorted(row for row, count in claimed.items() if count > 1):
        problems.append(f"{_listed('row', shared)} used by more than one request or hold")
    if bool(memory.rows.table[PADDING_ROW].any()):
        problems.append("the padding row was written to")
    return problems


def _request_problems(memory: KvMemory, live: Sequence[RequestKv], tree: set[PageId]) -> list[str]:
    max_pages = memory.rows.max_pages
    problems = []
    for kv in live:
        protected = kv.pages[: kv.cache_protected_len // kv.page_size]
        if strange := [page for page in protected if page not in tree]:
            problems.append(f"row {kv.row}: {_listed('page', strange)} pinned in the tree but not in it")
        if memory.rows.table[kv.row].tolist() != [*kv.pages, *[DUMMY_PAGE] * (max_pages - len(kv.pages))]:
            problems.append(f"row {kv.row}: the table does not list exactly the pages that the request holds")
        if not kv.cache_protected_len <= kv.committed_len <= kv.allocated_len:
            problems.append(
                f"row {kv.row}: cursors out of order, protected {kv.cache_protected_len}, "
                f"committed {kv.committed_len}, allocated {kv.allocated_len}"
            )
    return problems


def _window_problems(
    memory: KvMemory, live: Sequence[RequestKv], *, tree: Sequence[PageId], pending: Sequence[PageId]
) -> list[str]:
    """`pending` pages may still have their page of a window: a step in flight, or a peer, may write to it."""
    problems = []
    for index, window in enumerate(memory.windows):
        users = Counter(page for pin in memory.pins for page in pin.used[index])
        needed = []
        for kv in live:
            cached = kv.cache_protected_len // kv.page_size
            users.update(kv.pages[kv.passed[index] : cached])
            needed += kv.pages[max(kv.passed[index], cached) :]
            if kv.passed[index] > window.passed_blocks(kv.committed_len):
                problems.append(f"row {kv.row}: a window has passed {kv.passed[index]} blocks, too many")
        problems += window.problems(tree=tree, needed=needed, pending=pending, users=users)
    return problems


def _anchor_problems(memory: KvMemory, live: Sequence[RequestKv], *, tree: Sequence[PageId]) -> list[str]:
    if memory.anchors is None:
        return []
    pending = [*memory.landings, *(anchor.slot for kv in live for anchor in kv.pending_anchors)]
    pins = Counter(kv.continues_from for kv in live if kv.continues_from is not None)
    pins.update(pin.anchor for pin in memory.pins if pin.anchor is not None)
    return memory.anchors.problems(tree=tree, pending=pending, pins=pins)


def _listed(noun: str, ids: Sequence[int]) -> str:
    named = ", ".join(str(i) for i in ids[:NAMED])
    return f"{noun} {named}" if len(ids) <= NAMED else f"{noun} {named} and {len(ids) - NAMED} more"
