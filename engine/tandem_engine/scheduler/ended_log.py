"""What became of traced requests, kept until the process reports it.

    note ─▶ ended, at most `MAX_KEPT` ─▶ take, once per turn

Decides nothing, so ranks may differ in it: only one that has somewhere to report to sets `wanted`. Requests without a
sampled trace cost one comparison when they end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_engine.messages.ended_requests import EndedRequest
from tandem_engine.messages.outputs import Finish
from tandem_engine.scheduler.request import Request

MAX_KEPT = 4096


@dataclass(kw_only=True, slots=True)
class EndedLog:
    """Owned by the scheduler; its process empties it."""

    clock: Clock
    """The one that requests are timed by."""
    unix_ns: Callable[[], int] = time.time_ns
    wanted: bool = False
    lost: int = 0
    """Since start: those that nobody came for in time."""
    _ended: list[EndedRequest] = field(default_factory=list)

    def note(self, req: Request, finish: Finish | None) -> None:
        """`req` is over here; `finish` is None when it goes on elsewhere or is no longer wanted. Counts once."""
        context = req.trace
        if not self.wanted or context is None or not context.sampled or req.reported:
            return
        req.reported = True
        if len(self._ended) >= MAX_KEPT:
            self.lost += 1
            return
        self._ended.append(self._described(req, finish))

    def take(self) -> list[EndedRequest]:
        """Those noted since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def _described(self, req: Request, finish: Finish | None) -> EndedRequest:
        assert req.trace is not None, f"{req.rid} is not traced"
        now = self.clock.now()
        unix_ns = self.unix_ns()

        def moment(at: float) -> int:
            return unix_ns - round((now - at) * 1e9)

        def perhaps(at: float | None) -> int | None:
            return None if at is None else moment(at)

        known = req.first_scheduled_at is not None or req.transfer is not None
        return EndedRequest(
            rid=req.rid,
            context=req.trace,
            arrived_ns=moment(req.arrived_at),
            ended_ns=unix_ns,
            scheduled_ns=perhaps(req.first_scheduled_at),
            first_token_ns=perhaps(req.first_token_at),
            transferred_ns=perhaps(req.transferred_at),
            side=None if req.handoff is None else req.handoff.side,
            moving=req.handoff is not None and req.handoff.moving,
            transfer=req.transfer,
            fetch=req.fetched,
            prompt_tokens=req.prompt_len,
            cached_tokens=req.cached_tokens if known else None,
            cache_hits=req.cache_hits if known else None,
            resumed_tokens=req.resumed,
            output_tokens=len(req.output_ids) - req.resumed,
            retractions=req.retractions,
            max_tokens=req.sampling.max_tokens,
            temperature=req.sampling.temperature,
            top_p=req.sampling.top_p,
            finish=None if finish is None else finish.reason,
            error="" if finish is None or finish.code is None else finish.code,
        )
