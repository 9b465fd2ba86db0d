"""W3C Trace Context, as clients send it and as others send what looks like it."""

import pytest

from tandem_engine.messages.requests import TraceContext
from tandem_services.gateway.observe.tracing import client_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def context(parent: str | bytes, *states: str) -> TraceContext | None:
    value = parent if isinstance(parent, bytes) else parent.encode()
    headers = [(b"host", b"h"), (b"traceparent", value)]
    return client_context([*headers, *((b"tracestate", state.encode("latin-1")) for state in states)])


def test_good_header_is_taken_as_it_is():
    found = context(GOOD, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert found == TraceContext(traceparent=GOOD, tracestate="rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert (found.trace_id, found.span_id, found.sampled) == (TRACE, SPAN, True)
    found.check()


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_only_the_first_flag_means_sampled(flags, sampled):
    assert context(f"00-{TRACE}-{SPAN}-{flags}").sampled is sampled


def test_later_traceparent_version_is_read_and_sent_as_00():
    assert context(f"cc-{TRACE}-{SPAN}-01").traceparent == GOOD
    assert context(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings").traceparent == GOOD
    assert context(f"cc-{TRACE}-{SPAN}-01.not-this") is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        GOOD.encode() + b"-more",
        GOOD.upper().encode(),
        GOOD.encode()[:-1],
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"ff-{TRACE}-{SPAN}-01".encode(),
        f"0g-{TRACE}-{SPAN}-01".encode(),
        GOOD.encode().replace(b"-", b"_"),
        GOOD.encode() + b"\xff",
        b"\xef\xbc\x90" * 55,
        b"0" * 60_000,
    ],
)
def test_invalid_trace_header_counts_as_absent(value):
    assert context(value, "a=b") is None


def test_missing_and_repeated_traceparent_headers_are_ignored():
    assert client_context([(b"tracestate", b"a=b")]) is None
    assert client_context([(b"traceparent", GOOD.encode())] * 2) is None


@pytest.mark.parametrize(
    ("states", "handed_on"),
    [
        (["a=1", "b=2"], "a=1,b=2"),
        ([" a=1 ,\tb=2,, "], "a=1,b=2"),
        (["tenant@vendor=x"], "tenant@vendor=x"),
        ([""], ""),
        (["a"], ""),
        (["A=1"], ""),
        (["a=1,a=2"], ""),
        (["a=b=c"], ""),
        (["a=\x07"], ""),
        (["a=\xe9"], ""),
        (["a=" + "v" * 511], ""),
        ([",".join(f"k{n}=v" for n in range(33))], ""),
    ],
)
def test_state_is_handed_on_whole_or_not_at_all(states, handed_on):
    found = context(GOOD, *states)
    assert found.tracestate == handed_on
    found.check()
