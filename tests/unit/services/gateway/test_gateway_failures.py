"""Workers that die, hang, refuse or answer out of order, and clients that leave."""

import asyncio
import threading
from dataclasses import replace

import httpx
import pytest

from tandem_engine.config import Role
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_services.common.errors import StartupError
from tandem_services.common.sockets import listen
from tandem_testing.gateway_builders import EngineRack, FakeChooser, events, live_gateway
from tandem_testing.healthy_engines import TOKEN, healthy
from tandem_testing.loop_time import set_forward, set_forward_until
from tandem_testing.tcp_proxy import TcpProxy
from tandem_testing.waiting import until

OVERLOADED = Finish(reason=FinishReason.ERROR, code="queue_full", retryable=True)
TRANSFER_FAILED = Finish(reason=FinishReason.ERROR, code="transfer_error", retryable=True)
PATIENCE_S = 60.0
PING_S = 2.0
"""Three of them, and what a client waits for an answer, are more than a machine stands still for."""


async def seen(engine, condition) -> bool:
    return await asyncio.to_thread(engine.wait_until, condition)


async def answer_pings(engine, count: int, *, interval_s: float) -> None:
    """Let so many pings go out, without waiting for their time; `engine` has each before the next is sent."""
    for _ in range(count):
        pings = engine.pings
        set_forward(interval_s)
        assert await seen(engine, lambda pings=pings: engine.pings > pings)


@pytest.fixture
async def reference(tokenizer):
    """Text and usage of an unfaulted run, by number of tokens."""

    async def run(max_tokens: int, **fields):
        with EngineRack() as rack:
            rack.add("reference", healthy())
            async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
                answer = (await gateway.complete(max_tokens=max_tokens, seed=1, **fields)).json()
        return [choice["text"] for choice in answer["choices"]], answer["usage"]

    return run


@pytest.fixture
def faulty(rack, tokenizer):
    """Start a gateway in front of the engines that the test has put in the rack."""
    return lambda **config: live_gateway(rack.context, tokenizer, rack.engines, **config)


# Handoff


async def test_prefill_and_decode_get_the_two_ends_of_one_room(rack, faulty, reference):
    prefill = rack.add("p", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(), Role.DECODE)
    async with faulty() as gateway:
        answer = (await gateway.complete(max_tokens=9, seed=1)).json()
    [sent], [received] = prefill.received, decode.received
    assert sent.rid == received.rid == sent.handoff.room == received.handoff.room
    assert (sent.handoff.side, received.handoff.side) == (HandoffSide.SEND, HandoffSide.RECEIVE)
    assert (sent.handoff.peer.incarnation, received.handoff.peer.incarnation) == ("d@1", "p@1")
    assert sent.handoff.generation == received.handoff.generation
    texts, usage = await reference(9)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"] == usage
    assert not prefill.aborted
    assert not decode.aborted


@pytest.mark.parametrize("skip_first", [False, True])
async def test_tokens_of_both_workers_are_put_in_order(rack, faulty, reference, skip_first):  # [position-once]
    gate = threading.Event()
    rack.add("p", healthy(first_token_gate=gate), Role.PREFILL)
    decode = rack.add("d", healthy(skip_first=skip_first, awaits_handoff=False), Role.DECODE)
    async with faulty() as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        assert await seen(decode, lambda: decode.emitted >= 8)
        gate.set()
        answer = (await answering).json()
    texts, usage = await reference(9)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["completion_tokens"] == usage["completion_tokens"]


async def test_cached_tokens_are_reported_despite_late_prefill_reply(rack, faulty):
    gate = threading.Event()
    rack.add("p", healthy(first_token_gate=gate), Role.PREFILL)
    rack.add("d", healthy(awaits_handoff=False), Role.DECODE)
    async with faulty() as gateway:
        usage = (await gateway.complete(max_tokens=9)).json()["usage"]
        gate.set()
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


async def test_output_of_one_token_ends_with_the_prefill_worker(rack, faulty):  # [stop-strings]
    rack.add("p", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(mute=True), Role.DECODE)
    async with faulty() as gateway:
        answer = (await gateway.complete(max_tokens=1, seed=1)).json()
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"
        assert await seen(decode, lambda: decode.aborted)


# Retry


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": 1}])
async def test_decode_worker_that_dies_costs_no_token(rack, faulty, reference, stream, fields):
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d1", healthy(die_after=5), Role.DECODE)
    survivor = rack.add("d2", healthy(), Role.DECODE)
    async with faulty() as gateway:
        answer = await gateway.complete(max_tokens=20, seed=1, stream=stream, **fields)
        chunks = events(answer) if stream else [answer.json()]
    texts, usage = await reference(20, **fields)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, text in enumerate(texts):
        assert "".join(c["text"] for c in choices if c["index"] == index) == text
        finishes = [c["finish_reason"] for c in choices if c["index"] == index and c["finish_reason"]]
        assert finishes == ["length"]
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == usage["completion_tokens"]
    if "logprobs" in fields:
        assert sum(len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]) == 20
    assert survivor.received
    assert all(request.handoff.generation == 1 for request in survivor.received)


async def test_next_attempt_resumes_after_the_tokens_received(rack, faulty, reference):  # [resume-from-tokens]
    first = rack.add("d1", healthy(die_after=4))
    second = rack.add("d2", healthy())
    async with faulty() as gateway:
        answer = (await gateway.complete(max_tokens=9, seed=1)).json()
        assert answer["usage"]["completion_tokens"] == 9
    [original], [resumed] = first.received, second.received
    assert resumed.resume_ids == tuple(TOKEN(original, position) for position in range(4))
    assert (original.rid, resumed.rid) == (f"{original.rid[:-1]}0", f"{original.rid[:-1]}1")
    assert resumed.input_ids == original.input_ids
    assert resumed.sampling == original.sampling
    assert gateway.chooser.open == 0
    assert gateway.chooser.queries[-1].token_ids == resumed.input_ids + resumed.resume_ids
    # No worker with other weights may continue [same-kind-paired].
    assert [query.compat_hash for query in gateway.chooser.queries] == [None, first.view.compat_hash]


async def test_requests_of_dead_worker_resume_despite_an_exception(rack, faulty, monkeypatch):
    rack.add("d1", healthy(die_after=4))
    second = rack.add("d2", healthy())
    mark_dead = FakeChooser.mark_dead

    def failing(self, incarnation):
        mark_dead(self, incarnation)
        raise RuntimeError("planted")

    monkeypatch.setattr(FakeChooser, "mark_dead", failing)
    async with faulty() as gateway:
        answers = await asyncio.gather(*(gateway.complete(max_tokens=9, seed=seed) for seed in range(3)))
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {9}
    assert second.received


async def test_explain_tells_when_each_attempt_began_and_ended(rack, faulty):
    rack.add("d1", healthy(die_after=4))
    rack.add("d2", healthy())
    async with faulty() as gateway:
        answer = (await gateway.complete(max_tokens=9, seed=1)).json()
        record = (await gateway.http.get(f"/v1/requests/{answer['id']}/explain")).json()
    first, second = record["choices"][0]["attempts"]
    assert 0.0 <= first["began_s"] <= first["ended_s"] <= second["began_s"] <= second["ended_s"] <= record["e2e_s"]


async def test_reloaded_worker_may_resume_with_new_weights(rack, faulty):
    ended = Finish(reason=FinishReason.ERROR, code="reloaded", retryable=True)
    worker = rack.add("only", healthy(step_s=0.05, fail_after=(4, ended)))
    async with faulty() as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        assert await seen(worker, lambda: len(worker.received) == 1)
        gateway.chooser.fleet[:] = [replace(worker.view, compat_hash="other weights")]
        await answering
    assert worker.received[1].resume_ids
    assert {query.compat_hash for query in gateway.chooser.queries} == {None}


async def test_prefill_worker_exit_before_first_token_is_retried(rack, faulty, reference):
    rack.add("p1", healthy(die_after=0), Role.PREFILL)
    rack.add("p2", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(first_token_gate=None), Role.DECODE)
    decode.behavior.mute = True
    async with faulty() as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        assert await seen(decode, lambda: len(decode.received) == 2)
        decode.behavior.mute = False
        answer = (await answering).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]
    assert [request.handoff.peer.incarnation for request in decode.received] == ["p1@1", "p2@1"]
    assert decode.aborted == [decode.received[0].rid]


async def test_prefill_worker_exit_after_handoff_keeps_stream(rack, faulty, reference):
    prefill = rack.add("p", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(), Role.DECODE)
    async with (
        faulty() as gateway,
        gateway.http.stream(
            "POST",
            "/v1/completions",
            json={"model": "mock", "prompt": "hi", "max_tokens": 300, "seed": 1, "stream": True},
        ) as response,
    ):
        body = b""
        async for chunk in response.aiter_bytes():
            body += chunk
            # The first token is the prefill worker's; the sender of the next one has taken over.
            if body.count(b'"text"') >= 2:
                prefill.stop()
        assert body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in body
    assert len(decode.received) == 1


@pytest.mark.parametrize("failure", [OVERLOADED, Finish(reason=FinishReason.ABORT)])
async def test_retryable_refusal_goes_to_another_worker(rack, faulty, failure):
    rack.add("full", healthy(refuse=failure))
    free = rack.add("free", healthy())
    async with faulty() as gateway:
        assert (await gateway.complete(max_tokens=3)).status_code == 200
    assert len(free.received) == 1


async def test_failed_transfer_is_blamed_on_its_sender(rack, faulty):
    broken = rack.add("p1", healthy(mute=True), Role.PREFILL)
    rack.add("p2", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(refuse=TRANSFER_FAILED), Role.DECODE)
    async with faulty() as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=3))
        assert await seen(broken, lambda: broken.aborted)
        decode.behavior.refuse = None
        await answering
    assert gateway.chooser.queries[1].exclude == {"p1@1"}


async def test_one_live_worker_is_tried_again_when_there_is_no_other(rack, faulty):
    only = rack.add("only", healthy(refuse=OVERLOADED))
    async with faulty() as gateway:
        answer = await gateway.complete(max_tokens=3)
    assert len(only.received) == 3
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"


async def test_attempts_are_bounded(rack, faulty):  # [attempts-bounded]
    broken = Finish(reason=FinishReason.ERROR, code="engine_stopped", retryable=True)
    for name in ("a", "b", "c", "d"):
        rack.add(name, healthy(refuse=broken))
    async with faulty() as gateway:
        answer = await gateway.complete(max_tokens=9)
    assert answer.status_code == 500
    assert [len(engine.received) for engine in rack.engines] == [1, 1, 1, 0]


async def test_error_that_no_worker_can_help_is_not_retried(rack, faulty):
    rack.add("a", healthy(refuse=Finish(reason=FinishReason.ERROR, code="engine_error")))
    other = rack.add("b", healthy())
    async with faulty() as gateway:
        assert (await gateway.complete(max_tokens=3)).status_code == 500
    assert not other.received


async def test_new_request_without_workers_is_rejected_at_once(faulty):
    async with faulty() as gateway:
        answer = await gateway.complete(max_tokens=3)
        assert (await gateway.http.get("/ready")).status_code == 503
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"


async def test_stream_of_sole_dead_worker_ends_with_503_error(rack, faulty):  # [streams-wait]
    rack.add("only", healthy(die_after=3))
    async with faulty() as gateway:
        chunks = events(await gateway.complete([7, 8], max_tokens=30, stream=True, skip_special_tokens=False))
    assert chunks[-1]["error"]["type"] == "ServiceUnavailableError"


async def test_stream_waits_for_a_worker_to_come_back(rack, faulty, reference):  # [streams-wait]
    rack.add("first", healthy(die_after=3))
    replacement = rack.add("second", healthy())
    async with faulty(recovery_s=20.0) as gateway:
        gateway.chooser.fleet.remove(replacement.view)
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        await gateway.chooser.death.wait()
        gateway.chooser.fleet.append(replacement.view)
        answer = (await answering).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]


# Liveness


async def test_worker_that_answers_nothing_is_given_up(rack, faulty, reference):  # [silent-peer-dropped]
    frozen = rack.add("frozen", healthy(deaf=True))
    rack.add("awake", healthy())
    async with faulty(ping_interval_s=PING_S, unanswered_pings=3) as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        await until(lambda: gateway.chooser.open == 1, PATIENCE_S, "it is sent to a worker")
        await set_forward_until(lambda: gateway.chooser.dead == {"frozen@1"}, step_s=PING_S, steps=6)
        answer = (await answering).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]
    assert not frozen.received


@pytest.mark.parametrize("stream", [False, True])
async def test_silence_timeout_is_shared_across_attempts(rack, faulty, stream):
    rack.add("dead", healthy(die_after=2))
    for name in ("a", "b", "c"):
        rack.add(name, healthy(deaf=True))
    # Pings alone would give up the second worker after twenty seconds.
    async with faulty(ping_interval_s=20.0, silence_s=0.2) as gateway:
        answer = await gateway.complete(max_tokens=9, stream=stream)
        error = events(answer)[-1]["error"] if answer.status_code == 200 else answer.json()["error"]
        assert error["type"] == "InternalServerError"
        assert gateway.chooser.open == 0
        assert 'outcome="silence"} 1.0' in (await gateway.http.get("/metrics")).text


async def test_silence_counts_from_the_last_message_of_a_worker(rack, faulty, reference):
    rack.add("dead", healthy(die_after=2))
    busy = rack.add("busy", healthy(mute=True))
    async with faulty(ping_interval_s=0.25, unanswered_pings=50, silence_s=10.0) as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        assert await seen(busy, lambda: busy.received)
        # Together longer than the silence that is allowed.
        await answer_pings(busy, 60, interval_s=0.25)
        busy.behavior.mute = False
        answer = (await answering).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]


async def test_worker_with_an_impossible_endpoint_is_passed_over(rack, faulty, reference):  # [redis-values-untrusted]
    broken = rack.add("broken", healthy())
    rack.add("sound", healthy())
    async with faulty() as gateway:
        gateway.chooser.fleet[0] = replace(broken.view, request_endpoint="tcp://:::/etc/passwd")
        answer = (await gateway.complete(max_tokens=9, seed=1)).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]
    assert gateway.chooser.dead == {"broken@1"}


async def test_cut_idle_connection_does_not_mark_worker_dead(rack, faulty, reference):
    """Every worker's connection at once: no other worker could take the next request."""
    worker = rack.add("only", healthy())
    address = worker.view.request_endpoint.removeprefix("tcp://").split(":")
    proxy = await TcpProxy.open(lambda: (address[0], int(address[1])))
    try:
        async with faulty() as gateway:
            gateway.chooser.fleet[0] = replace(worker.view, request_endpoint=f"tcp://127.0.0.1:{proxy.port}")
            for _ in range(2):
                answer = (await gateway.complete(max_tokens=9, seed=1)).json()
                assert answer["choices"][0]["text"] == (await reference(9))[0][0]
                pings = worker.pings
                proxy.cut()
                # It is greeted over the new connection; ZMQ may have opened the old one again before it was closed.
                assert await seen(worker, lambda pings=pings: worker.pings > pings)
            assert (await gateway.complete(max_tokens=9, seed=1)).status_code == 200
            assert gateway.chooser.dead == set()
    finally:
        await proxy.close()


async def test_idle_worker_exit_is_detected_before_next_request(rack, faulty):
    worker = rack.add("only", healthy())
    async with faulty() as gateway:
        assert (await gateway.complete(max_tokens=3, seed=1)).status_code == 200
        await asyncio.to_thread(worker.stop)
        await asyncio.wait_for(gateway.chooser.death.wait(), 60.0)
        assert gateway.chooser.dead == {"only@1"}


async def test_long_queue_is_not_death(rack, faulty):
    busy = rack.add("busy", healthy(mute=True))
    async with faulty(ping_interval_s=0.25, unanswered_pings=50) as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=3))
        assert await seen(busy, lambda: busy.received)
        await answer_pings(busy, 60, interval_s=0.25)
        busy.behavior.mute = False
        assert (await answering).status_code == 200
    assert len(busy.received) == 1


# Disconnects


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_client_that_leaves_aborts_everything_everywhere(rack, faulty, stream, n):  # [client-leaves-aborts]
    prefill = rack.add("p", healthy(mute=True), Role.PREFILL)
    decode = rack.add("d", healthy(mute=True), Role.DECODE)
    async with faulty() as gateway:
        body = {"model": "mock", "prompt": "hi", "max_tokens": 400, "stream": stream, "n": n}
        async with httpx.AsyncClient() as client:
            leaving = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json=body, timeout=60))
            for engine in rack.engines:
                assert await seen(engine, lambda engine=engine: len(engine.received) == n)
            leaving.cancel()
        for engine in (prefill, decode):
            assert await seen(engine, lambda engine=engine: len(engine.aborted) == n)
        assert (await gateway.http.get("/live")).status_code == 200

        async def counted() -> bool:
            metrics = (await gateway.http.get("/metrics")).text
            gone = 'tandem_gateway_client_disconnects_total{model_name="mock"} 1.0' in metrics
            idle = 'tandem_gateway_num_requests_running{model_name="mock"} 0.0' in metrics
            return gone and idle and 'code="499"' in metrics

        await until(counted, PATIENCE_S, "the client counts as gone")
        await until(lambda: gateway.chooser.open == 0, PATIENCE_S, "its reservations are given back")


async def test_client_that_leaves_in_the_middle_of_a_stream_aborts_it(rack, faulty):
    engine = rack.add("solo", healthy(hold_at=20))
    async with faulty() as gateway:
        body = {"model": "mock", "prompt": "hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
        assert await seen(engine, lambda: engine.aborted)
        assert engine.running == 0


async def test_unreadable_reply_condemns_the_worker(rack, faulty, reference):  # [wire-refused]
    liar = rack.add("liar", healthy(mute=True))
    rack.add("honest", healthy())
    async with faulty(ping_interval_s=0.1, unanswered_pings=50) as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=9, seed=1))
        assert await seen(liar, lambda: liar.received)
        liar.send_malformed = True
        answer = (await answering).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]
    assert "liar@1" in gateway.chooser.dead


async def test_outputs_of_unknown_requests_are_ignored(rack, faulty, reference):  # [unknown-id-ignored]
    rack.add("chatty", healthy(strays=True))
    async with faulty() as gateway:
        answer = (await gateway.complete(max_tokens=9, seed=1)).json()
    assert [choice["text"] for choice in answer["choices"]] == (await reference(9))[0]


async def test_our_own_failure_is_a_500_that_tells_nothing(rack, faulty, caplog, monkeypatch):
    rack.add("solo", healthy())
    async with faulty() as gateway:

        async def broken(query):
            raise RuntimeError("secret of tcp://10.0.0.1")

        monkeypatch.setattr(gateway.chooser, "choose", broken)
        answer = await gateway.complete(max_tokens=3)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert "secret" not in answer.text
        [line] = [record for record in caplog.records if record.message == "request failed unexpectedly"]
        assert line.fields["request_id"] == answer.headers["x-request-id"]
        assert "secret" in str(line.exc_info)
        monkeypatch.undo()
        assert (await gateway.complete(max_tokens=3)).status_code == 200


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("192.0.2.1", 0), ("no.such.host.invalid", 0)])
def test_address_that_cannot_be_listened_on_is_named(host, port):  # [config-refused]
    with pytest.raises(StartupError, match="choose another --host or --port"):
        listen(host, port)


def test_taken_port_is_named():  # [config-refused]
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=str(port)):
            listen("127.0.0.1", port)


async def test_storm_of_retries_costs_workers_nothing(rack, tokenizer):  # [retry-storm]
    """Clients retry at once after any error: workers compute only what is answered."""
    engine = rack.add("solo", healthy())
    engine.behavior.mute = True
    clients, refused = 24, 0
    async with live_gateway(rack.context, tokenizer, rack.engines, max_waiting=4, silence_s=60.0) as gateway:
        gateway.chooser.room = 2

        async def insist(number: int) -> httpx.Response:
            nonlocal refused
            while True:
                answer = await gateway.complete(f"prompt {number}", max_tokens=4, ignore_eos=True)
                if answer.status_code == 200:
                    return answer
                assert answer.status_code in (429, 503)
                assert int(answer.headers["retry-after"]) >= 1
                refused += 1
                # No client is served until five times as many requests as clients have been refused.
                engine.behavior.mute = refused < 5 * clients

        answers = await asyncio.gather(*[insist(number) for number in range(clients)])
        assert gateway.chooser.open == 0
    assert refused >= 5 * clients
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [4] * clients
    assert len(engine.received) == clients
    assert engine.emitted == 4 * clients
