"""Engine → worker service: when what an engine has done for a traced attempt began and ended.

Said once, when the attempt is over, of attempts whose trace is sampled; the worker service makes spans of it. Nothing
of it holds text.
"""

from typing import Annotated

import msgspec

from tandem_engine.messages.outputs import CacheHits, FetchReport, FinishReason, TransferReport
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.trace_context import TraceContext

MAX_REPORTED = 256
"""Attempts in one message."""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt that is over on one engine. Moments are Unix nanoseconds by that machine's clock; their differences
    are exact, for one reading of the clock places all of them."""

    rid: str
    context: TraceContext
    arrived_ns: int
    ended_ns: int
    scheduled_ns: int | None = None
    """When the first step that computes its prompt was planned."""
    first_token_ns: int | None = None
    """Of those sampled here."""
    transferred_ns: int | None = None
    """When its KV was committed (the receiving engine) or handed over (the sending one)."""
    side: HandoffSide | None = None
    moving: bool = False
    transfer: TransferReport | None = None
    fetch: FetchReport | None = None
    prompt_tokens: int
    cached_tokens: int | None = None
    """None when its prompt was not begun."""
    cache_hits: CacheHits | None = None
    resumed_tokens: int = 0
    output_tokens: int = 0
    """Beyond those; the one that came with the KV counts."""
    retractions: int = 0
    max_tokens: int
    temperature: float
    top_p: float
    finish: FinishReason | None = None
    """None: it went on elsewhere, or was no longer wanted."""
    error: str = ""
    """Stable code of the error that ended it."""


class EndedRequests(msgspec.Struct, frozen=True, kw_only=True, tag="ended_requests"):
    """Sampled attempts that have ended since the last message."""

    requests: Annotated[tuple[EndedRequest, ...], msgspec.Meta(max_length=MAX_REPORTED)]
    lost: int
    """Since start: those that could not be reported."""
