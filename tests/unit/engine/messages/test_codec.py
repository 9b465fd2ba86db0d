"""Bytes from other processes are messages of ours or a `WireError`; nothing in between."""

import contextlib
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.errors import WireError
from tandem_engine.messages.codec import MAX_MESSAGE_BYTES, WIRE_VERSION, Codec
from tandem_engine.messages.requests import AbortRequest, EngineRequest, GenerateRequest, Ping
from tandem_engine.messages.sampling import SamplingParams

REQUEST = GenerateRequest(
    rid="r", input_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4, stop=("x",), logprobs=2), resume_ids=(9,)
)


@pytest.fixture
def codec() -> Codec[EngineRequest]:
    return Codec(EngineRequest)


@pytest.mark.parametrize("message", [REQUEST, AbortRequest(rid="r"), Ping(nonce=7)])
def test_encoded_message_decodes_to_an_equal_one(codec, message) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes((WIRE_VERSION,)),
        bytes((WIRE_VERSION + 1,)) + msgspec.msgpack.encode({"type": "abort", "rid": "r"}),
        bytes((WIRE_VERSION,)) + msgspec.msgpack.encode({"type": "unknown", "rid": "r"}),
        bytes((WIRE_VERSION,)) + msgspec.msgpack.encode({"type": "abort"}),
        bytes((WIRE_VERSION,)) + msgspec.msgpack.encode({"type": "abort", "rid": 5}),
        bytes((WIRE_VERSION,)) + b"\x91" * 5000,
        pickle.dumps({"rid": "r"}),
    ],
    ids=["empty", "header only", "other version", "unknown kind", "field missing", "wrong type", "deep", "pickle"],
)
def test_malformed_message_raises_a_wire_error(codec, data) -> None:
    with pytest.raises(WireError):
        codec.decode(data)


def test_message_over_size_limit_is_rejected_before_parsing(codec) -> None:
    with pytest.raises(WireError, match="over the limit"):
        codec.decode(bytes(MAX_MESSAGE_BYTES + 1))


@given(data=st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data) -> None:
    codec: Codec[EngineRequest] = Codec(EngineRequest)
    with contextlib.suppress(WireError):
        codec.decode(bytes((WIRE_VERSION,)) + data)


@pytest.mark.parametrize("field", [b"generate", b"rid", b"r"])
def test_string_that_is_no_utf8_is_refused_like_any_other_bytes(codec, field) -> None:  # [wire-refused]
    data = codec.encode(GenerateRequest(rid="r", input_ids=(1,), sampling=SamplingParams(max_tokens=1)))
    with pytest.raises(WireError):
        codec.decode(data.replace(field, b"\xff" * len(field), 1))


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_message_decodes_or_is_refused(changes) -> None:  # [wire-refused]
    codec: Codec[EngineRequest] = Codec(EngineRequest)
    data = bytearray(codec.encode(REQUEST))
    for at, byte in changes:
        data[1 + at % (len(data) - 1)] = byte
    with contextlib.suppress(WireError):
        codec.decode(bytes(data))
