"""Where an attempt belongs in its request's trace.

    client ─ traceparent ─▶ gateway ─ TraceContext in each GenerateRequest ─▶ engine ─ EndedRequest ─▶ worker service

The engine knows no tracing library: it keeps the context that it was given, for its log and for its report.
"""

import re

import msgspec

from tandem_engine.errors import InvalidRequestError

MAX_TRACESTATE_CHARACTERS = 512
"""What W3C Trace Context asks everybody to hand on."""

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(rf"[\x20-\x7e]{{0,{MAX_TRACESTATE_CHARACTERS}}}")


class TraceContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The span that the work is part of, in the form of W3C Trace Context."""

    traceparent: str
    """00-TRACE-SPAN-FLAGS in hexadecimal."""
    tracestate: str = ""
    """What tracing systems add for themselves; handed on as it came."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for what W3C Trace Context does not allow."""
        if not _TRACEPARENT.fullmatch(self.traceparent):
            raise InvalidRequestError("trace.traceparent is not 00-TRACE-SPAN-FLAGS in hexadecimal", param="trace")
        if not _TRACESTATE.fullmatch(self.tracestate):
            raise InvalidRequestError(
                f"trace.tracestate may have at most {MAX_TRACESTATE_CHARACTERS} printable ASCII characters",
                param="trace",
            )

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return self.traceparent[36:52]

    @property
    def sampled(self) -> bool:
        """Whether spans of this trace are wanted. False for a context that `check` refuses."""
        return self.valid and bool(int(self.traceparent[53:], 16) & 1)

    @property
    def valid(self) -> bool:
        """Whether `check` would let it pass."""
        return bool(_TRACEPARENT.fullmatch(self.traceparent) and _TRACESTATE.fullmatch(self.tracestate))
