"""Draining workers: their requests migrate with their KV, and the client sees one stream."""

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.healthy_engines import healthy
from tandem_testing.mock_engine import MockBehavior

TRANSFER_FAILED = Finish(reason=FinishReason.ERROR, code="transfer_error", retryable=True)


def leaving(after: int, **knobs) -> MockBehavior:
    """Requests migration, and sends nothing more two tokens later: a request that stays has no answer."""
    return healthy(leave_after=after, hold_at=after + 2, **knobs)


@pytest.fixture
def gateway(rack, tokenizer):
    """Start a gateway in front of the engines that the test has put in the rack."""
    return lambda **config: live_gateway(rack.context, tokenizer, rack.engines, **config)


async def outcomes(gateway, answer_id: str) -> list[str]:
    record = (await gateway.http.get(f"/v1/requests/{answer_id}/explain")).json()
    return [attempt["outcome"] for attempt in record["choices"][0]["attempts"]]


async def test_draining_worker_migrates_its_request_with_kv(rack, gateway):
    leaver = rack.add("d1", leaving(6), Role.DECODE)
    taker = rack.add("d2", healthy(), Role.DECODE)
    async with gateway() as live:
        answer = (await live.complete(max_tokens=20, seed=1)).json()
        assert await outcomes(live, answer["id"]) == ["moved", "finished"]
        assert live.chooser.open == 0
    [first, send], [receive] = leaver.received, taker.received
    assert (send.handoff.side, receive.handoff.side) == (HandoffSide.SEND, HandoffSide.RECEIVE)
    assert (send.handoff.moving, receive.handoff.moving) == (True, False)
    assert send.handoff.room == receive.handoff.room != first.rid
    assert send.resume_ids == receive.resume_ids
    assert len(send.resume_ids) >= 6
    # What it was doing ends before it sends: its pages are free to be found.
    assert leaver.aborted[0] == first.rid
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": 1}])
async def test_moved_stream_is_the_stream_of_one_worker(rack, gateway, stream, fields):
    leaver = rack.add("d1", healthy(), Role.DECODE)
    rack.add("d2", healthy(), Role.DECODE)
    async with gateway() as live:
        whole = (await live.complete(max_tokens=20, seed=1, **fields)).json()
        leaver.behavior = leaving(5)
        answer = await live.complete(max_tokens=20, seed=1, stream=stream, **fields)
        chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for expected in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        if "logprobs" in fields:
            tokens = [token for choice in mine if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
            assert tokens == expected["logprobs"]["tokens"]


async def test_without_another_worker_the_request_stays_where_it_is(rack, gateway):
    only = rack.add("d1", healthy(leave_after=2), Role.DECODE)
    async with gateway() as live:
        answer = (await live.complete(max_tokens=20, seed=1)).json()
        assert await outcomes(live, answer["id"]) == ["finished"]
    assert answer["usage"]["completion_tokens"] == 20
    assert len(only.received) == 1


async def test_move_that_fails_costs_a_recomputation_and_no_token(rack, gateway):
    leaver = rack.add("d1", healthy(), Role.DECODE)
    taker = rack.add("d2", healthy(), Role.DECODE)
    async with gateway() as live:
        whole = (await live.complete(max_tokens=20, seed=1)).json()
        leaver.behavior = leaving(6)
        taker.behavior.fail_after = (10, TRANSFER_FAILED)
        spare = rack.add("d3", healthy(), Role.DECODE)
        live.chooser.fleet.append(spare.view)
        answer = (await live.complete(max_tokens=20, seed=1)).json()
        assert (await outcomes(live, answer["id"]))[0] == "moved"
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]


async def test_moves_are_no_failures_however_many_there_are(rack, gateway):
    for number in range(5):
        # Few tokens each: fewer than prove that a worker brings a request further.
        rack.add(f"d{number}", healthy(leave_after=1, hold_at=3 * (number + 1)), Role.DECODE)
    rack.add("last", healthy(leave_after=1), Role.DECODE)
    async with gateway(max_attempts=2) as live:
        answer = (await live.complete(max_tokens=40, seed=1)).json()
        assert await outcomes(live, answer["id"]) == ["moved"] * 5 + ["finished"]
    assert answer["usage"]["completion_tokens"] == 40
