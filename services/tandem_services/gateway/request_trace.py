"""What the rest of the gateway knows of tracing, and all there is of it where it is off.

    RequestBoundary ─ Traces ─▶ RequestTrace ─ attempt ─▶ AttemptTrace ─ context ─▶ GenerateRequest.trace
          answered ◀───────────── finished (accounted for) ◀──── ended

`PassedOn` makes no spans: what a client sent is handed on to the engines as it came, as those who do not trace must.
`request_spans` makes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from starlette.types import Scope

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.messages.trace_context import TraceContext
from tandem_services.gateway.explain import AttemptRecord, RequestRecord
from tandem_services.gateway.trace_headers import client_context
from tandem_services.router.choice import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStart:
    """What is known of an attempt when it is sent. Moments are the gateway's clock."""

    attempt_id: str
    index: int
    """Of the choice."""
    number: int
    asked_at: float
    """Since when a worker was wanted."""
    choice: Choice
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
        """The last word to the client. Called once, after all else."""
        ...


Traces: TypeAlias = Callable[[Scope, str, float], RequestTrace]
"""Begins the trace of a request: its ASGI scope, our id, and when it arrived on the gateway's clock."""


@dataclass(frozen=True, slots=True)
class PassedOn:
    """No spans, of a request or of an attempt."""

    context: TraceContext | None

    @property
    def trace_id(self) -> str | None:
        return None if self.context is None else self.context.trace_id

    def attempt(self, start: AttemptStart) -> AttemptTrace:
        del start
        return self

    def received(self, tokens: int) -> None:
        pass

    def ended(self) -> None:
        pass

    def finished(self, record: RequestRecord) -> None:
        pass

    def answered(self, status: int) -> None:
        pass


UNTRACED = PassedOn(None)


def pass_on(scope: Scope, request_id: str, arrived: float) -> RequestTrace:
    """The `Traces` of a gateway that makes no spans."""
    del request_id, arrived
    context = client_context(scope["headers"])
    return UNTRACED if context is None else PassedOn(context)
