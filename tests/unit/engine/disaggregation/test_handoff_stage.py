"""Both sides together: a prefill and a decode engine over a fabric without faults."""

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.transfer import WriteGrant
from tandem_testing.disagg_pair import PROMPT, Pair, make_pair


@pytest.fixture
def pair() -> Pair:
    return make_pair()


def test_request_computed_on_two_engines_has_the_output_of_one(pair):
    pair.submit()
    pair.run()
    assert pair.prefill.tokens() == pair.expected()[:1]
    assert pair.decode.tokens() == pair.expected()
    pair.assert_clean()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_handoff_accepts_either_request_order(pair, first):
    late = pair.submit_decode if first == "prefill" else pair.submit_prefill
    (pair.submit_prefill if first == "prefill" else pair.submit_decode)()
    pair.turn(5)
    late()
    pair.run()
    assert pair.decode.tokens() == pair.expected()
    pair.assert_clean()


def test_many_requests_share_both_engines():
    pair = make_pair(chunked_prefill_size=8, max_prefill_tokens=16)
    rids = [pair.submit(f"r{i}", range(i + 1, i + 12), max_tokens=6) for i in range(12)]
    pair.run()
    assert [pair.decode.tokens(rid) for rid in rids] == [pair.expected(rid) for rid in rids]
    pair.assert_clean()


def test_concurrent_handoffs_of_equal_prompts_are_correct():
    pair = make_pair(chunked_prefill_size=4)
    rids = [pair.submit(f"r{i}", PROMPT) for i in range(4)]
    pair.run()
    assert [pair.decode.tokens(rid) for rid in rids] == [pair.expected(rid) for rid in rids]
    pair.assert_clean()


def test_second_turn_transfers_only_new_pages(pair):
    pair.submit("first", PROMPT)
    pair.run()
    conversation = (*PROMPT, *pair.expected("first"), 5, 6, 7)
    pair.submit("second", conversation)
    pair.run()
    assert pair.decode.tokens("second") == pair.expected("second")
    grants = pair.decode.link.messages(WriteGrant)
    assert grants[1].first_token >= 8
    assert len(grants[1].pages) < -(-len(conversation) // 4)


def test_engine_acts_as_prefill_and_decode_concurrently(pair):
    pair.submit("there", PROMPT)
    swapped = Pair(fabric=pair.fabric, network=pair.network, prefill=pair.decode, decode=pair.prefill)
    swapped.submit("back", range(30, 44))
    pair.run()
    assert pair.decode.tokens("there") == pair.expected("there")
    assert swapped.decode.tokens("back") == swapped.expected("back")
    pair.assert_clean()


@pytest.mark.parametrize("turns", range(6))
def test_aborting_both_ends_at_any_moment_leaks_nothing(turns):
    pair = make_pair(chunked_prefill_size=4)
    pair.submit()
    pair.turn(turns)
    for side in (pair.decode, pair.prefill):
        side.engine.scheduler.abort(RequestId("r"))
    pair.run()
    assert pair.decode.finish().reason is FinishReason.ABORT
    pair.assert_clean()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_peer_exit_at_any_step_leaks_nothing_on_survivor(turns, dies):
    pair = make_pair(chunked_prefill_size=4)
    pair.submit()
    pair.turn(turns)
    dead, survivor = (pair.prefill, pair.decode) if dies == "prefill" else (pair.decode, pair.prefill)
    pair.fabric.kill(dead.peer.incarnation)
    pair.network.kill(dead.peer.incarnation)
    survivor.stage.peer_ended(dead.peer.incarnation)
    for _ in range(40):
        survivor.step()
        pair.fabric.advance()
    survivor.assert_clean()
    if dies == "prefill":
        finish = survivor.finish()
        assert finish.retryable or survivor.tokens() == pair.expected()


def test_statistics_follow_the_transfer():
    pair = make_pair(chunked_prefill_size=4)
    pair.submit()
    pair.turn(2)
    assert (pair.prefill.stage.inflight(), pair.decode.stage.transferring()) == (0, 1)
    pair.submit_prefill("lonely")
    pair.turn(8)
    assert pair.prefill.stage.inflight() == 1
    assert pair.decode.stage.transferring() == 0
    assert pair.decode.stage.counters.bytes_received == 3 * pair.decode.engine.model.pool.page_bytes
