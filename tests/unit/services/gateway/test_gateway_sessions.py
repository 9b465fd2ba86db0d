"""Conversations over HTTP: a turn goes to the worker that keeps its session, or the client learns to start over."""

import asyncio
from dataclasses import replace

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest, HandoffSide, SessionRef
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.dispatch.dispatcher import pair_of_requests
from tandem_services.router.shared_state import SessionBinding, SessionName
from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.healthy_engines import healthy
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.tokenizer_builders import CHATML, EOS, write_tokenizer

LOST = Finish(reason=FinishReason.ERROR, code="session_lost", param="session", error="session 's' is not kept here")
BUSY = Finish(reason=FinishReason.ERROR, code="session_error", param="session", error="session 's' is busy")
NAME = SessionName(id="s")


async def turn(gateway, prompt="hi", *, number: int | None = None, **fields):
    params = {"id": "s"} if number is None else {"id": "s", "turn": number}
    return await gateway.complete(prompt, session_params=params, **{"max_tokens": 4, "ignore_eos": True, **fields})


def assert_lost(response) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (409, "session_lost", "session_params.id")
    assert "Send the whole conversation" in error["message"]


@pytest.fixture
async def two(rack, tokenizer):
    """A gateway with two workers that do both, and the engines."""
    engines = [rack.add(name, healthy()) for name in ("a", "b")]
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        yield gateway, engines


async def test_later_turns_go_to_the_worker_that_has_the_first(two):
    gateway, (a, b) = two
    assert (await turn(gateway, [5, 6], number=0)).status_code == 200
    gateway.chooser.fleet.reverse()  # from here on all others go to b
    assert (await turn(gateway, [7])).status_code == 200
    last = (await turn(gateway, [8, 9], number=2)).json()
    await gateway.complete([1])
    assert [request.session for request in a.received] == [
        SessionRef(id="s", turn=0),
        SessionRef(id="s", turn=None),
        SessionRef(id="s", turn=2),
    ]
    assert [request.input_ids for request in a.received] == [(5, 6), (7,), (8, 9)]
    assert [request.session for request in b.received] == [None]
    assert last["usage"]["prompt_tokens"] == 2 + 4 + 1 + 4 + 2
    assert gateway.chooser.open == 0


async def test_session_that_was_opened_begins_with_its_first_turn(two):
    gateway, (a, _) = two
    opened = (await gateway.http.post("/v1/sessions", json={"session_id": "s"})).json()
    assert opened == {"id": "s", "object": "session", "expires_in": 600.0}
    await turn(gateway)
    await turn(gateway)
    assert [request.session.turn for request in a.received] == [0, None]
    again = await gateway.http.post("/v1/sessions", json={"session_id": "s"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")


async def test_clients_of_sglang_open_and_close_in_their_way(two):
    gateway, (a, _) = two
    session_id = (await gateway.http.post("/open_session", json={"capacity_of_str_len": 1000})).json()
    await gateway.complete("hi", session_params={"id": session_id}, max_tokens=2)
    assert (await gateway.http.post("/close_session", json={"session_id": session_id})).status_code == 200
    assert await asyncio.to_thread(a.wait_until, lambda: a.closed_sessions == [session_id])
    assert (await gateway.http.post("/close_session", json={"session_id": session_id})).status_code == 404


async def test_closed_session_is_lost(two):
    gateway, (a, _) = two
    await turn(gateway, number=0)
    closed = (await gateway.http.delete("/v1/sessions/s")).json()
    assert closed == {"id": "s", "object": "session.deleted", "deleted": True}
    assert await asyncio.to_thread(a.wait_until, lambda: a.closed_sessions == ["s"])
    assert_lost(await turn(gateway))


async def test_turn_of_unknown_session_is_lost(two):
    gateway, engines = two
    assert_lost(await turn(gateway))
    assert_lost(await turn(gateway, number=3))
    assert not any(engine.received for engine in engines)


async def test_sessions_belong_to_a_cache_salt(two):
    gateway, (a, _) = two
    await turn(gateway, number=0, cache_salt="mine")
    assert_lost(await turn(gateway, cache_salt="yours"))
    assert (await gateway.http.delete("/v1/sessions/s")).status_code == 404
    assert (await gateway.http.delete("/v1/sessions/s?cache_salt=mine")).status_code == 200
    assert len(a.received) == 1


async def test_session_is_lost_with_its_worker_and_no_other_is_asked(two):
    gateway, (a, b) = two
    await turn(gateway, number=0)
    a.behavior.die_after = a.emitted + 2
    assert_lost(await turn(gateway))
    assert_lost(await turn(gateway))
    assert not b.received
    assert (await turn(gateway, "all of it", number=0)).status_code == 200
    assert [request.session for request in b.received] == [SessionRef(id="s", turn=0)]
    assert gateway.chooser.open == 0


async def test_stream_learns_that_its_session_is_lost(two):
    gateway, (a, _) = two
    await turn(gateway, number=0)
    a.behavior.step_s, a.behavior.die_after = 0.01, a.emitted + 20
    *_, last = events(await turn(gateway, stream=True, max_tokens=100))
    assert last["error"]["code"] == "session_lost"


async def test_first_turn_resumes_and_session_binds_to_new_worker(two):
    gateway, (a, b) = two
    a.behavior.die_after = 2
    assert (await turn(gateway, number=0)).status_code == 200
    [resumed] = b.received
    assert (resumed.session.turn, len(resumed.resume_ids)) == (0, 2)
    assert (await turn(gateway)).status_code == 200
    assert gateway.sessions.bindings[NAME].incarnation == "b@1"


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (LOST, 409, "session_lost"),
        (BUSY, 409, "session_error"),
        (Finish(reason=FinishReason.ERROR, code="draining", retryable=True), 409, "session_lost"),
        (Finish(reason=FinishReason.ERROR, code="paused", retryable=True), 503, None),
        (Finish(reason=FinishReason.ERROR, code="queue_full", retryable=True), 503, None),
    ],
)
async def test_session_error_of_worker_reaches_the_client(two, refusal, status, code):
    gateway, (a, b) = two
    await turn(gateway, number=0)
    before = gateway.sessions.bindings[NAME]
    a.behavior.refuse = refusal
    response = await turn(gateway)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert not b.received
    assert gateway.sessions.bindings[NAME] == before


async def test_first_turn_that_failed_may_be_sent_again(rack, tokenizer):
    engine = rack.add("a", healthy(refuse=Finish(reason=FinishReason.ERROR, code="invalid_request", error="no")))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        await gateway.http.post("/v1/sessions", json={"session_id": "s"})
        assert (await turn(gateway)).status_code == 400
        engine.behavior.refuse = None
        assert (await turn(gateway)).status_code == 200
        assert [request.session.turn for request in engine.received] == [0, 0]


async def test_decode_worker_keeps_session_and_prefills_later_turns(rack, tokenizer):
    prefill = rack.add("p", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(), Role.DECODE)
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        assert (await turn(gateway, number=0)).status_code == 200
        assert (await turn(gateway)).status_code == 200
    [sent], [received, alone] = prefill.received, decode.received
    assert (sent.session, received.session) == (None, SessionRef(id="s", turn=0))
    assert received.handoff.side is HandoffSide.RECEIVE
    assert (alone.session, alone.handoff) == (SessionRef(id="s", turn=None), None)


async def test_first_turn_does_not_end_where_its_prompt_is_computed(rack, tokenizer):
    """No KV would be sent, and no worker would keep the session."""
    prefill = rack.add("p", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(), Role.DECODE)
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        await turn(gateway, number=0, max_tokens=1, ignore_eos=False, stop="end", stop_token_ids=[7])
        await turn(gateway, number=0, max_tokens=9, ignore_eos=False, min_tokens=3, stop_token_ids=[7])
    one, suppressed = prefill.received
    assert (one.sampling.max_tokens, one.sampling.ignore_eos, one.sampling.stop_token_ids) == (2, True, ())
    assert (suppressed.sampling, decode.received[0].sampling.max_tokens) == (decode.received[1].sampling, 1)


@pytest.mark.parametrize(
    ("prompt", "received", "asked", "sent"),
    [
        (30, 0, {"max_tokens": 2}, (2, True)),
        (31, 0, {"max_tokens": 1}, (1, False)),
        (20, 3, {"max_tokens": 4}, (5, True)),
        (20, 3, {"max_tokens": 9, "min_tokens": 3}, (9, True)),
        (20, 2, {"max_tokens": 9, "min_tokens": 3}, (9, False)),
    ],
    ids=["fits", "context ends", "resumed at the end", "resumed", "end suppressed"],
)
def test_prompt_of_a_session_gets_an_end_that_fits(prompt, received, asked, sent):
    request = GenerateRequest(
        rid="r",
        input_ids=tuple(range(prompt)),
        resume_ids=tuple(range(received)),
        sampling=SamplingParams(**asked),
        session=SessionRef(id="s"),
    )
    prefill, decode = (
        make_view(name, role, context_length=32) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    )
    receive, send = pair_of_requests(request, replace(make_choice("r", decode), prefill=prefill), 0, moving=False)
    assert (send.sampling.max_tokens, send.sampling.ignore_eos) == sent
    assert (send.session, receive.session, receive.sampling) == (None, request.session, request.sampling)
    assert (send.handoff.keeps_session, receive.handoff.keeps_session) == (True, False)


@pytest.mark.parametrize("number", [7, EOS])
async def test_stop_token_that_begins_a_first_turn_is_no_text(rack, tokenizer, number):
    """The prefill worker does not know that it ends the output."""
    prefill, decode = (
        rack.add(name, MockBehavior(token=scripted_tokens([number, 5]), eos=EOS), role)
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    )
    fields = {"ignore_eos": False, "stop_token_ids": [7], "skip_special_tokens": False, "return_token_ids": True}
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        [choice] = (await turn(gateway, number=0, **fields)).json()["choices"]
        parts = events(await turn(gateway, number=0, stream=True, **fields))
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [number], "stop")
    assert "".join(part["choices"][0]["text"] for part in parts) == ""
    assert (len(prefill.received), len(decode.received)) == (2, 2)
    assert tokenizer.decode([number], skip_special_tokens=False)


async def test_nothing_is_sent_while_bindings_cannot_be_read(two):
    gateway, (a, _) = two
    await turn(gateway, number=0)
    gateway.sessions.reachable = False
    response = await turn(gateway)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (await gateway.http.post("/v1/sessions", json={})).status_code == 503
    assert (await gateway.http.delete("/v1/sessions/s")).status_code == 503
    assert len(a.received) == 1
    assert (await gateway.complete("without a session")).status_code == 200


async def test_session_chat_sends_only_new_messages(rack, tokenizer):
    answer = [*tokenizer.encode("fox", add_special_tokens=False), EOS]
    engine = rack.add("a", MockBehavior(token=scripted_tokens(answer), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        await gateway.chat("the dog", session_params={"id": "s", "turn": 0})
        await gateway.chat("hello", session_params={"id": "s"}, max_tokens=1)
        await gateway.chat("world", session_params={"id": "s"})
    first, second, third = (list(request.input_ids) for request in engine.received)
    talk = [
        {"role": "user", "content": "the dog"},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "hello"},
    ]
    assert first + answer + second == tokenizer.encode_chat(talk)
    more = [{"role": "assistant", "content": tokenizer.decode(answer[:1])}, {"role": "user", "content": "world"}]
    assert first + answer + second + answer[:1] + third == tokenizer.encode_chat([*talk, *more])


async def test_session_that_fills_the_context_is_refused(two):
    gateway, (a, _) = two
    await turn(gateway, [5] * 500, number=0)
    response = await turn(gateway, [6] * 10)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(a.received) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_params": {"id": ""}}, "session_params.id"),
        ({"session_params": {"id": "x" * 300}}, "session_params.id"),
        ({"session_params": {}}, "session_params.id"),
        ({"session_params": {"id": "s", "turn": -1}}, "session_params.turn"),
        ({"session_params": {"id": "s", "rid": "r"}}, "session_params.rid"),
        ({"session_params": "s"}, "session_params"),
        ({"session_params": {"id": "s", "turn": 0}, "n": 2}, "n"),
        ({"session_params": {"id": "s", "turn": 0}, "best_of": 2}, "n"),
        ({"session_params": {"id": "s", "turn": 0}, "prompt": ["a", "b"]}, "n"),
        ({"session_params": {"id": "s", "turn": 0}, "echo": True}, "echo"),
    ],
)
async def test_options_unsupported_in_sessions_are_rejected_by_name(two, fields, param):
    gateway, engines = two
    response = await gateway.complete(**{"prompt": "hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not any(engine.received for engine in engines)


async def test_turn_that_no_message_can_carry_is_a_400_not_a_500(two):
    gateway, (a, _) = two
    await turn(gateway, number=0)
    answer = await turn(gateway, number=10**30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_params.turn")
    assert len(a.received) == 1


async def test_client_that_leaves_leaves_the_session_as_it_was(two):
    gateway, (a, _) = two
    await turn(gateway, number=0)
    before = gateway.sessions.bindings[NAME]
    a.behavior.hold_at = 9
    leaving = asyncio.ensure_future(turn(gateway, max_tokens=200))
    assert await asyncio.to_thread(a.wait_until, lambda: a.emitted == 4 + 9)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await asyncio.to_thread(a.wait_until, lambda: len(a.aborted) == 1)
    assert gateway.sessions.bindings[NAME] == before == SessionBinding("a@1", 2 + 4, before.last_token)


def test_template_that_rewrites_answers_cannot_be_continued(tmp_path):
    from tandem_engine.base.errors import InvalidRequestError
    from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

    rewriting = CHATML.replace("{{ message.content }}", "{{ message.content | length }}")
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=rewriting))
    with pytest.raises(InvalidRequestError, match="rewrites earlier answers"):
        tokenizer.encode_chat_turn([{"role": "user", "content": "hi"}], last_token=None)
