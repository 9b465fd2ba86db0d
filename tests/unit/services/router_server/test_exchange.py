"""The endpoint picker's side of Envoy's external processing, message by message."""

from dataclasses import dataclass, field

import pytest
from google.protobuf import text_format

from tandem_services.common.errors import ApiError, bad_request, unavailable
from tandem_services.gateway.limits import MAX_BODY_BYTES
from tandem_services.router_server.endpoint_picker import RequestHead
from tandem_services.router_server.ext_proc import CHUNK_BYTES, Exchange, ProtocolError
from tandem_services.router_server.routing_service import Places
from tandem_testing.ext_proc_builders import (
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    answer_body,
    answer_head,
    answer_trailers,
    body,
    head,
    kinds,
    set_headers,
    streamed,
    trailers,
)

TICKET = "ab" * 16


@dataclass
class FakePick:
    endpoints: tuple[str, ...] = ("10.0.0.1:8000", "10.0.0.2:8000")
    reservation: str | None = TICKET
    served: list[str] = field(default_factory=list)
    ended: int = 0

    def served_by(self, endpoint: str) -> None:
        self.served.append(endpoint)

    def end(self) -> None:
        self.ended += 1


@dataclass
class FakePicker:
    outcome: FakePick | ApiError = field(default_factory=FakePick)
    asked: list[tuple[RequestHead, bytes | None]] = field(default_factory=list)

    async def pick(self, asked: RequestHead, content: bytes | None) -> FakePick:
        self.asked.append((asked, content))
        if isinstance(self.outcome, ApiError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def picker() -> FakePicker:
    return FakePicker()


@pytest.fixture
def memory() -> Places:
    return Places(most=2 * MAX_BODY_BYTES, what="bytes")


@pytest.fixture
def exchange(picker, memory) -> Exchange:
    return Exchange(picker, memory)


async def play(exchange: Exchange, *messages) -> list[list[str]]:
    return [kinds(await exchange.answer(message)) for message in messages]


DUPLEX_REST = [(answer_head(), ["response_headers"]), (answer_body(b"x"), ["response_body"])]
SCRIPTS = {
    "a body in one piece": [(head(), []), (body(b"{}"), ["request_headers", "request_body"]), *DUPLEX_REST],
    "a body in pieces": [
        (head(), []),
        (body(b"{", end=False), []),
        (body(b"}", end=False), []),
        (body(b""), ["request_headers", "request_body"]),
        *DUPLEX_REST,
    ],
    "a body that ends with trailers": [
        (head(), []),
        (body(b"{}", end=False), []),
        (trailers(), ["request_headers", "request_body", "request_trailers"]),
        (answer_head(), ["response_headers"]),
        (answer_body(b"x", end=False), ["response_body"]),
        (answer_trailers(), ["response_trailers"]),
    ],
    "the data plane does not say how it sends bodies": [
        (head(mode=None), []),
        (body(b"{}"), ["request_headers", "request_body"]),
        *DUPLEX_REST,
    ],
    "no body": [(head(method="GET", end=True), ["request_headers"]), (answer_head(end=True), ["response_headers"])],
    "a body that is not read": [
        (head(method="PUT"), ["request_headers"]),
        (body(b"1", end=False), ["request_body"]),
        (body(b"2"), ["request_body"]),
        *DUPLEX_REST,
    ],
    "buffered": [
        (head(mode=BUFFERED), ["request_headers"]),
        (body(b"{}"), ["request_body"]),
        (answer_head(), ["response_headers"]),
        (answer_body(b"x"), ["response_body"]),
    ],
    "buffered, with trailers": [
        (head(mode=BUFFERED), ["request_headers"]),
        (body(b"{}", end=False), ["request_body"]),
        (trailers(), ["request_trailers"]),
        (answer_head(end=True), ["response_headers"]),
    ],
    "streamed": [
        (head(mode=STREAMED), ["request_headers"]),
        (body(b"1", end=False), ["request_body"]),
        (body(b"2"), ["request_body"]),
        (answer_head(), ["response_headers"]),
    ],
    "headers alone": [(head(mode=NONE), ["request_headers"]), (answer_head(), ["response_headers"])],
    "the answer's body comes before the request's end": [
        (head(method="PUT"), ["request_headers"]),
        (answer_head(), ["response_headers"]),
        (answer_body(b"x", end=False), ["response_body"]),
        (body(b"2"), ["request_body"]),
        (answer_body(b"y"), ["response_body"]),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_every_message_has_its_answers_and_one_pick(exchange, picker, memory, script):
    assert await play(exchange, *(message for message, _ in script)) == [answers for _, answers in script]
    assert len(picker.asked) == 1
    exchange.close()
    assert picker.outcome.ended >= 1
    assert memory.taken == 0


@pytest.mark.parametrize(
    ("mode", "content"),
    [(DUPLEX, b'{"a": 1}'), (None, b'{"a": 1}'), (BUFFERED, b'{"a": 1}'), (STREAMED, None), (NONE, None)],
)
async def test_pick_is_made_with_body_if_available_whole(exchange, picker, mode, content):
    await play(exchange, head(mode=mode, authorization="Bearer k"), body(b'{"a": 1}'))
    ((asked, given),) = picker.asked
    assert given == content
    assert (asked.path, asked.first("authorization"), asked.subset) == ("/v1/completions", "Bearer k", None)


GOLDEN = f"""
request_headers {{
  response {{
    header_mutation {{
      set_headers {{
        header {{ key: "x-gateway-destination-endpoint" raw_value: "10.0.0.1:8000,10.0.0.2:8000" }}
        append_action: OVERWRITE_IF_EXISTS_OR_ADD
      }}
      set_headers {{
        header {{ key: "x-tandem-reservation" raw_value: "{TICKET}" }}
        append_action: OVERWRITE_IF_EXISTS_OR_ADD
      }}
    }}
    clear_route_cache: true
  }}
}}
dynamic_metadata {{
  fields {{
    key: "envoy.lb"
    value {{
      struct_value {{
        fields {{
          key: "x-gateway-destination-endpoint"
          value {{ string_value: "10.0.0.1:8000,10.0.0.2:8000" }}
        }}
      }}
    }}
  }}
}}
"""


async def test_destination_is_equal_in_header_and_metadata(exchange):
    await exchange.answer(head())
    first, *_ = await exchange.answer(body(b"{}"))
    assert first == text_format.Parse(GOLDEN, type(first)())


async def test_buffered_mode_sets_destination_in_body_response(exchange):
    (first,) = await exchange.answer(head(mode=BUFFERED))
    assert set_headers(first) == {}
    (second,) = await exchange.answer(body(b"{}"))
    assert set_headers(second)["x-gateway-destination-endpoint"] == "10.0.0.1:8000,10.0.0.2:8000"
    assert second.request_body.response.clear_route_cache


async def test_without_a_reservation_a_clients_own_header_is_removed(exchange, picker):
    picker.outcome.reservation = None
    (first,) = await exchange.answer(head(method="GET", end=True, x_tandem_reservation=TICKET))
    assert set_headers(first) == {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000"}
    assert [*first.request_headers.response.header_mutation.remove_headers] == ["x-tandem-reservation"]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_body_is_forwarded_in_chunks_within_envoy_limit(exchange, size):
    content = bytes(number % 251 for number in range(size))
    await exchange.answer(head())
    await exchange.answer(body(content[: size // 2], end=False))
    answers = await exchange.answer(body(content[size // 2 :]))
    assert streamed(answers) == (content, True)
    assert max(answer.ByteSize() for answer in answers) < 64 << 10


async def test_trailers_end_the_body_and_not_its_last_chunk(exchange):
    await exchange.answer(head())
    await exchange.answer(body(b"{}", end=False))
    assert streamed(await exchange.answer(trailers())) == (b"{}", False)


async def test_response_body_is_streamed_unchanged(exchange):
    await play(exchange, head(), body(b"{}"), answer_head())
    for content, end in ((b"one", False), (b"two" * CHUNK_BYTES, False), (b"", True)):
        answers = await exchange.answer(answer_body(content, end=end))
        assert streamed(answers, "response_body") == (content, end)


async def test_response_body_that_is_not_duplex_is_not_changed(exchange):
    await play(exchange, head(response_mode=STREAMED), body(b"{}"), answer_head())
    (answer,) = await exchange.answer(answer_body(b"one"))
    assert not answer.response_body.response.HasField("body_mutation")


@pytest.mark.parametrize(
    "last", [answer_head(end=True), answer_body(b"x"), answer_trailers()], ids=["head", "body", "trailers"]
)
async def test_end_of_the_response_stream_ends_the_pick_of_a_worker(exchange, picker, last):
    await play(exchange, head(), body(b"{}"))
    if last.WhichOneof("request") != "response_headers":
        await play(exchange, answer_head())
    assert picker.outcome.ended == 0
    await exchange.answer(last)
    assert picker.outcome.ended == 1


async def test_broken_exchange_ends_pick_and_frees_body_memory(exchange, picker, memory):
    await play(exchange, head(), body(b"{" * 1000, end=False))
    assert memory.taken == 1000
    exchange.close()
    assert memory.taken == 0
    other = Exchange(picker, memory)
    await play(other, head(), body(b"{}"))
    other.close()
    assert picker.outcome.ended == 1


async def test_serving_endpoint_is_reported_to_the_picker(exchange, picker):
    await play(exchange, head(), body(b"{}"), answer_head(served="10.0.0.2:8000"))
    assert picker.outcome.served == ["10.0.0.2:8000"]


IMMEDIATE = """
immediate_response {
  status { code: ServiceUnavailable }
  headers {
    set_headers {
      header { key: "content-type" raw_value: "application/json" }
      append_action: OVERWRITE_IF_EXISTS_OR_ADD
    }
    set_headers {
      header { key: "retry-after" raw_value: "2" }
      append_action: OVERWRITE_IF_EXISTS_OR_ADD
    }
  }
  body: '{"error":{"message":"Nobody.","type":"ServiceUnavailableError","param":null,"code":null}}'
  details: "tandem_router_ServiceUnavailableError"
}
"""


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
async def test_refusal_is_an_immediate_response_and_the_end(picker, memory, mode):
    picker.outcome = unavailable("Nobody.", retry_after=1.5)
    exchange = Exchange(picker, memory)
    await exchange.answer(head(mode=mode))
    (answer,) = await exchange.answer(body(b"{}"))
    assert answer == text_format.Parse(IMMEDIATE, type(answer)())
    assert exchange.over
    assert memory.taken == 0


async def test_statuses_without_a_name_in_envoy_are_sent_as_well(picker, memory):
    picker.outcome = ApiError(429, "Later.", kind="RateLimitError")
    (answer,) = await Exchange(picker, memory).answer(head(end=True))
    assert answer.immediate_response.status.code == 429
    picker.outcome = bad_request("No.")
    (answer,) = await Exchange(picker, memory).answer(head(end=True))
    assert answer.immediate_response.status.code == 400


async def test_oversized_body_is_rejected_before_it_is_read(exchange, picker, memory):
    piece = body(b"x" * (MAX_BODY_BYTES // 2), end=False)
    await play(exchange, head(), piece, piece)
    (answer,) = await exchange.answer(body(b"x", end=False))
    assert answer.immediate_response.status.code == 413
    assert (picker.asked, exchange.over) == ([], True)
    exchange.close()
    assert memory.taken == 0


async def test_bodies_of_all_requests_together_are_bounded(picker):
    memory = Places(most=10, what="bytes of request bodies")
    first, second = Exchange(picker, memory), Exchange(picker, memory)
    await play(first, head(), body(b"x" * 8, end=False))
    await second.answer(head())
    (answer,) = await second.answer(body(b"x" * 8, end=False))
    assert answer.immediate_response.status.code == 429
    second.close()
    assert memory.taken == 8


@pytest.mark.parametrize(
    "subset", [["10.0.0.2:8000", "10.0.0.3:8000"], "10.0.0.2:8000, 10.0.0.3:8000"], ids=["list", "text"]
)
async def test_subset_of_the_data_plane_reaches_the_pick(exchange, picker, subset):
    await play(exchange, head(subset=subset, end=True))
    assert picker.asked[0][0].subset == ("10.0.0.2:8000", "10.0.0.3:8000")


async def test_empty_subset_is_not_the_same_as_none(exchange, picker):
    await play(exchange, head(subset=[], end=True))
    assert picker.asked[0][0].subset == ()


async def test_observed_request_is_not_answered(exchange):
    first = head()
    first.observability_mode = True
    assert await play(exchange, first, body(b"{}"), answer_head()) == [[], [], []]


@pytest.mark.parametrize(
    "messages",
    [[body(b"{}")], [answer_head()], [head(), head()], [type(head())()], [head(), type(head())()]],
    ids=["body first", "answer first", "two heads", "nothing", "nothing later"],
)
async def test_message_out_of_protocol_order_is_an_error(exchange, messages):
    with pytest.raises(ProtocolError):
        await play(exchange, *messages)
