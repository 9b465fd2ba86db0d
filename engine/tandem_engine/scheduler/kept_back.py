"""Memory kept back for prompts that were overtaken on their way to the queue.

A prompt for another worker may be held up: its grammar is being compiled, its prefix read from storage, or the prompt
that it shares with another choice of its answer is being computed. Its receiver grants it pages in order of arrival
all the same. Prompts that come later and overtake it keep their memory until that receiver has pages for them too;
were they to take all there is, neither worker could go on:

    writer     full of later prompts, which wait for ─▶ receiver's pages, which are granted to the earlier prompt
                                       ▲                                                                │
                                       └──────── room for that prompt, once it is no longer held up ◀───┘

So who waits for another worker overtakes only while what was overtaken still fits beside it. Requests that run here
to their end give their memory back whatever others do, and need not look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv


class KeptBack(NamedTuple):
    """What somebody may not take."""

    rows: int
    pages: int


NOTHING = KeptBack(rows=0, pages=0)


def kept_back(memory: KvMemory, queues: Queues, req: Request) -> KeptBack:
    """What `req`, which will wait for another worker, leaves to prompts that it overtakes."""
    earlier = [other for other in _held_up(queues) if other.arrived_at < req.arrived_at and _needs_memory(other)]
    if not earlier:
        return NOTHING
    return KeptBack(rows=len(earlier), pages=sum(memory.pages_for(other.seq_len) for other in earlier))


def _held_up(queues: Queues) -> Iterator[Request]:
    """Requests that will be in the queue without anybody giving up memory for it."""
    yield from queues.compiling.values()
    yield from queues.prefetching
    for leader, followers in queues.groups.led():
        if leader.kv is not None or leader.rid in queues.compiling or leader in queues.prefetching:
            yield from followers


def _needs_memory(req: Request) -> bool:
    return req.kv is None and sends_kv(req) and req.to_finish is None
