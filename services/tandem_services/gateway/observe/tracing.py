"""The gateway's interface to tracing, which is all of it if tracing is disabled. `spans` implements it otherwise.

    RequestBoundary ─ Traces ─▶ RequestTrace ─ attempt ─▶ AttemptTrace ─ context ─▶ GenerateRequest.trace
          response ◀───────────── finished (recorded) ◀──── ended

`PassedOn` creates no spans: it forwards the client's trace context unchanged to the engines.

`client_context` reads the headers of W3C Trace Context. An invalid or repeated `traceparent` is ignored, and a new
trace starts here, as the standard requires. `tracestate` counts only with a valid `traceparent`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from starlette.types import Scope

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.messages.requests import MAX_TRACESTATE_CHARACTERS, TraceContext
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.recording import estimating, recording
from tandem_services.gateway.observe.explain import AttemptRecord, RequestRecord
from tandem_services.router.decision import RouteDecision

_TRACEPARENT = re.compile(
    rb"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_KEY = r"(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
MAX_MEMBERS = 32


@estimating(lambda _: None)
def client_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The client's trace context; None without a valid one. Names of headers are in lower case."""
    parents, states = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    parent = _TRACEPARENT.fullmatch(parents[0].strip(b" \t"))
    if parent is None or (parent["version"] == b"00" and parent["more"] is not None):
        return None
    # A later version is read as far as this one is known, and only as that handed on.
    traceparent = b"-".join((b"00", parent["trace"], parent["span"], parent["flags"]))
    return TraceContext(traceparent=traceparent.decode("ascii"), tracestate=_tracestate(states))


def _tracestate(headers: list[bytes]) -> str:
    """All headers as one list; "" when any of it is not what the standard allows, or more than all must hand on."""
    members = [member.strip(" \t") for member in b",".join(headers).decode("latin-1").split(",")]
    members = [member for member in members if member]
    state = ",".join(members)
    if len(state) > MAX_TRACESTATE_CHARACTERS or len(members) > MAX_MEMBERS:
        return ""
    keys = {member.partition("=")[0] for member in members}
    return state if len(keys) == len(members) and all(map(_MEMBER.fullmatch, members)) else ""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStart:
    """What is known of an attempt when it is sent. Moments are the gateway's clock."""

    attempt_id: str
    index: int
    """Of the choice."""
    number: int
    requested_at: float
    """Since when a worker was wanted."""
    decided_s: float
    """How long the route decision took."""
    decision: RouteDecision
    note: AttemptRecord
    sampling: SamplingParams
    model: str


class AttemptTrace(Protocol):
    """One attempt at one choice."""

    @property
    def context(self) -> TraceContext | None:
        """For the engines."""
        ...

    def received(self, tokens: int) -> None:
        """New tokens are here."""
        ...

    def ended(self) -> None:
        """Its outcome is in the attempt's record. Called once."""
        ...


class RequestTrace(Protocol):
    """One HTTP request."""

    @property
    def trace_id(self) -> str | None:
        """For logs; None when the request belongs to no trace."""
        ...

    def attempt(self, start: AttemptStart) -> AttemptTrace:
        """An attempt is about to be sent."""
        ...

    def finished(self, record: RequestRecord) -> None:
        """Everything about an accepted request is known."""
        ...

    def answered(self, status: int) -> None:
        """The response is complete. Called once, after all other calls."""
        ...


Traces: TypeAlias = Callable[[Scope, str, float], RequestTrace]
"""Begins the trace of a request: its ASGI scope, our id, and when it arrived on the gateway's clock."""


@dataclass(frozen=True, slots=True)
class PassedOn:
    """No spans, of a request or of an attempt."""

    context: TraceContext | None

    @property
    @estimating(lambda _: None)
    def trace_id(self) -> str | None:
        return None if self.context is None else self.context.trace_id

    @estimating(lambda passed_on, _: passed_on)
    def attempt(self, start: AttemptStart) -> AttemptTrace:
        del start
        return self

    def received(self, tokens: int) -> None:
        """Once per token: `recording` would cost more than it does."""

    @recording
    def ended(self) -> None:
        pass

    @recording
    def finished(self, record: RequestRecord) -> None:
        pass

    @recording
    def answered(self, status: int) -> None:
        pass


UNTRACED = PassedOn(None)


@estimating(lambda *_: UNTRACED)
def pass_on(scope: Scope, request_id: str, arrived: float) -> RequestTrace:
    """The `Traces` of a gateway that makes no spans."""
    del request_id, arrived
    context = client_context(scope["headers"])
    return UNTRACED if context is None else PassedOn(context)
