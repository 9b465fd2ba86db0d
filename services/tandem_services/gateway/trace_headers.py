"""The trace that a client's request belongs to, by the headers of W3C Trace Context.

A `traceparent` that is none, or that comes twice, is as good as none: the request is served, and its trace begins here
(rules of the standard). `tracestate` counts only beside a good `traceparent`.
"""

import re
from collections.abc import Iterable

from tandem_engine.messages.trace_context import MAX_TRACESTATE_CHARACTERS, TraceContext

_TRACEPARENT = re.compile(
    rb"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_KEY = r"(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
MAX_MEMBERS = 32


def client_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """What the client says; None when it says nothing that counts. Names of headers are in lower case."""
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
