"""How disaggregation plugs into the scheduler: queue stages that implement one Protocol.

The scheduler runs the same loop for every role. A stage sees a request at the moments below and may keep it; a kept
request is *live* in the stage and in no other queue.

    ingress ──accept──▶ [stage keeps it: decode waits for KV] ──scheduler.admit_prebuilt──▶ running
       │
       ▼ (not accepted)
    waiting ─▶ EXTEND chunks ──chunk_launched, then chunk_settled (per chunk)──▶ last chunk ──prefill_settled
                                                                                        │           │
                                                                        (not kept)      ▼           ▼
                                                                                    running    [stage keeps it:
                                                                                                  inflight]
                                                                                                    │
                                                                                                    ▼
                                                                                            scheduler.release

Every method runs on the scheduler thread and must not block.
"""

from collections.abc import Iterator
from typing import Protocol

from tandem_engine.base.names import PageId, ReqPoolIdx, RequestId
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.messages.outputs import Finish
from tandem_engine.scheduler.request import Request


class AwaitedPages(Protocol):
    """Part of a request's prefix that is on its way to where the request can use it."""

    @property
    def done(self) -> bool:
        """Whether all of it is there, or will not come."""
        ...

    @property
    def until(self) -> float:
        """Monotonic time after which the request continues without what is missing."""
        ...


class QueueStage(Protocol):
    """One role's part in the life of a request."""

    def accept(self, req: Request) -> bool:
        """A validated new request. True: the stage keeps it and will admit or fail it."""
        ...

    def fetch(self, req: Request) -> AwaitedPages | None:
        """`req` was not accepted and will be computed here: begin to bring a prefix of it that another engine has.

        None if there is nothing to wait for.
        """
        ...

    def poll(self) -> bool:
        """Once per loop, before planning: exchange messages, move requests. True if anything happened."""
        ...

    def run_during_forward(self) -> bool:
        """Once and again while a step is waited for: get on with what touches neither queues nor memory. True if more
        is to come soon. With several ranks each calls it when and as often as it likes."""
        ...

    def chunk_launched(self, req: Request, stop: int, progress: KvProgress) -> None:
        """A step that computes KV of `req` up to token `stop` is about to be launched; `progress` follows it.

        Only of requests whose KV goes to another worker. What the step writes is not settled before
        `chunk_settled`; if the step fails, `req.kv` gets another identity and the tokens are computed again.
        """
        ...

    def chunk_settled(self, req: Request) -> None:
        """KV [0, req.kv.committed_len) of `req` is final; called after each EXTEND step, the last included."""
        ...

    def prefill_settled(self, req: Request) -> bool:
        """The prompt is computed and its first token is in `req.output_ids` (streamed already).

        True: the stage keeps the request, which leaves the scheduler's queues but keeps pages and row
        until the stage calls `StageSide.release`. Also called when that token finished the request
        (`req.finished` is set); then the stage must not keep it.
        """
        ...

    def aborted(self, req: Request) -> None:
        """`req` ended by abort or error anywhere in the scheduler: notify the other side. Idempotent."""
        ...

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        """End a request that the stage keeps with `finish`. False when the stage does not have it."""
        ...

    def live(self) -> Iterator[Request]:
        """Requests that the stage keeps now."""
        ...

    def held_pages(self) -> Iterator[PageId]:
        """Pages in transfer holds that no request owns (any more): for the audit."""
        ...

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        """Rows in those holds."""
        ...

    def holds_for_a_while(self) -> bool:
        """Whether pages that no request owns are kept from all, and will come back by themselves."""
        ...

    def forget_kv(self) -> None:
        """The prefix cache is about to be emptied: release locks on it, and bring nothing more into it."""
        ...
