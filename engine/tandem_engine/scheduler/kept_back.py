"""Memory kept back for prompts that were overtaken on their way to the queue.

A prompt for another worker may be held up: its grammar is being compiled, or its prefix read from storage. Its
receiver grants it pages in order of arrival all the same. Prompts that come later and overtake it keep their memory
until that receiver has pages for them too; were they to take all there is, neither worker could go on:

    writer     full of later prompts, which wait for ─▶ receiver's pages, which are granted to the earlier prompt
                                       ▲                                                                │
                                       └──────── room for that prompt, once it is no longer held up ◀───┘

So who waits for another worker overtakes only while what was overtaken still fits beside it. Requests that run here
to their end give their memory back whatever others do, and need not look.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv


class KeptBack(NamedTuple):
    """What somebody may not take."""

    rows: int
    pages: int


NOTHING = KeptBack(rows=0, pages=0)


def held_up(queues: Queues) -> tuple[Request, ...]:
    """Prompts for other workers that are not in the queue yet. () costs nothing where nobody is held up."""
    if not queues.compiling and not queues.prefetching:
        return ()
    return tuple(_without_memory(chain(queues.compiling.values(), queues.prefetching)))


def kept_back(memory: KvMemory, overtaken: Iterable[Request], req: Request) -> KeptBack:
    """What `req`, which will wait for another worker, leaves to those of `overtaken` that came before it."""
    earlier = [other for other in overtaken if other is not req and other.arrived_at <= req.arrived_at]
    if not earlier:
        return NOTHING
    return KeptBack(rows=len(earlier), pages=sum(memory.pages_for(other.seq_len) for other in earlier))


def _without_memory(requests: Iterable[Request]) -> Iterator[Request]:
    return (req for req in requests if req.kv is None and sends_kv(req) and req.to_finish is None)
