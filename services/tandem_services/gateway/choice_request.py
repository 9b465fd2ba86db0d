"""One choice of one client request, as the dispatcher takes it, and the policy by which it fights for its life."""

import math
from dataclasses import dataclass, field
from typing import Any

from tandem_engine.logs import about_request
from tandem_engine.messages.pooling import PoolingParams
from tandem_engine.messages.requests import attempt_id
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.progress import Progress
from tandem_services.gateway.request_trace import UNTRACED, RequestTrace
from tandem_services.gateway.route_ticket import RouteTicket
from tandem_services.gateway.session_turns import SessionTurn
from tandem_services.gateway.shared_route import SharedRoute


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a choice fights for its life."""

    max_attempts: int = 3
    """In a row, each with fewer than `PROOF_TOKENS` new tokens."""
    recovery_s: float = math.inf
    """A choice that has begun waits this long for a worker when there is none; in any case its deadline ends it."""
    silence_s: float = 10.0
    """Workers that say nothing at all, one after the other, have this long together [bounded-waits]."""
    poll_s: float = 0.1
    prefill_fallback: bool = True
    """Without prefill workers decode workers compute prompts, instead of nobody [decode-computes-prompts]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceRequest:
    """One choice of one client request, ready to be sent."""

    request_id: str
    index: int
    model: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int
    session_key: str = ""
    """Whose request it is, for routing by the policy `session`."""
    pooling: PoolingParams | None = None
    """An embedding is wanted instead of text; `sampling` then allows one token."""
    group: str = ""
    """Name that all choices of the prompt share, "" when there is one."""
    route: SharedRoute | None = None
    """Where their first attempts go."""
    ticket: RouteTicket = field(default_factory=RouteTicket)
    """Where the first attempt of all is to go, if a stand-alone router has chosen."""
    turn: SessionTurn | None = None
    """The session that it continues."""
    deadline: float
    """Monotonic time of the gateway's clock."""
    caller: Caller = field(default_factory=Caller)
    trace: RequestTrace = UNTRACED

    @property
    def about(self) -> dict[str, Any]:
        """Fields of log records about it."""
        return {**about_request(self.request_id, trace_id=self.trace.trace_id), "choice": self.index}

    def attempt_id(self, progress: Progress) -> str:
        """Of its current attempt."""
        return attempt_id(self.request_id, self.index, progress.number)
