"""What is left of an engine that died without a word, and how its successor is met [dead-peer-released]."""

import pytest

from tandem_engine.messages.requests import HandoffSide
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import GRANT_TIMEOUT, HOLD_TIMEOUT, PROMPT, Pair, Side, handoff, make_pair, make_side
from tandem_testing.scheduler_builders import expected_output, make_message

FENCED_AFTER_S = 12.0
"""At the latest; see test_internal_waits.py."""


def die(pair: Pair, dead: Side) -> None:
    pair.fabric.kill(dead.peer.incarnation)
    pair.network.kill(dead.peer.incarnation)


def outlive(pair: Pair, survivor: Side, seconds: float) -> None:
    """Let the survivor turn for `seconds` of its clock."""
    end = survivor.engine.clock.time + seconds
    while survivor.engine.clock.time < end:
        survivor.step()
        pair.fabric.advance()
        survivor.engine.clock.time += 0.25


def successor(pair: Pair, dead: Side) -> Side:
    """A new incarnation with the same name, at the same address."""
    number = int(dead.peer.incarnation.rpartition("@")[2]) + 1
    peer = make_peer(dead.peer.worker_id, number)
    assert peer.endpoint == dead.peer.endpoint
    return make_side(peer, fabric=pair.fabric, network=pair.network)


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_silent_peer_blocks_requests_at_most_for_its_lease(turns, dies):
    """Its death is not reported. Its pages wait until it is: it may still write [late-write]."""
    pair = make_pair(chunked_prefill_size=4)
    pair.submit(max_tokens=60)
    pair.turn(turns)
    dead, survivor = (pair.prefill, pair.decode) if dies == "prefill" else (pair.decode, pair.prefill)
    die(pair, dead)
    outlive(pair, survivor, max(GRANT_TIMEOUT, HOLD_TIMEOUT) + 1.0)
    assert survivor.stage.transferring() == survivor.stage.inflight() == 0
    outlive(pair, survivor, FENCED_AFTER_S - GRANT_TIMEOUT - 1.0)
    survivor.stage.peer_gone(dead.peer.incarnation)
    outlive(pair, survivor, 20.0)
    survivor.stage.peer_ended(dead.peer.incarnation)
    outlive(pair, survivor, 1.0)
    survivor.assert_clean()
    assert survivor.stage.quarantined_pages() == 0
    assert dead.peer.incarnation in survivor.link.fenced


@pytest.mark.parametrize("turns", range(6))
def test_restarted_prefill_worker_completes_its_first_request(turns):  # [restart-is-new-peer]
    pair = make_pair(chunked_prefill_size=4)
    pair.submit("old")
    pair.turn(turns)
    die(pair, pair.prefill)
    pair.prefill = successor(pair, pair.prefill)
    # Its first word fences the older one.
    pair.decode.link.supersede("p@1")
    pair.submit("new")
    pair.turn()
    pair.decode.stage.peer_ended("p@1")
    pair.run()
    assert pair.decode.tokens("new") == pair.expected("new")
    pair.assert_clean()
    assert pair.decode.stage.quarantined_pages() == 0


@pytest.mark.parametrize("turns", range(6))
def test_decode_worker_that_came_back_works_on_its_first_request(turns):  # [restart-is-new-peer]
    pair = make_pair(chunked_prefill_size=4)
    pair.submit("old")
    pair.turn(turns)
    die(pair, pair.decode)
    pair.decode = successor(pair, pair.decode)
    pair.prefill.link.supersede("d@1")
    pair.submit("new")
    pair.run()
    assert pair.decode.tokens("new") == pair.expected("new")
    pair.assert_clean()


def test_retry_in_same_room_is_independent_of_previous_attempt():  # [ack-per-grant]
    """A retry meets the same two engines, with another generation."""
    pair = make_pair(chunked_prefill_size=4)
    pair.submit("first")
    pair.turn(3)
    for side, peer in ((HandoffSide.RECEIVE, pair.prefill.peer), (HandoffSide.SEND, pair.decode.peer)):
        engine = (pair.decode if side is HandoffSide.RECEIVE else pair.prefill).engine
        engine.add(make_message("second", PROMPT, handoff=handoff(side, peer, "room-first", generation=2)))
    pair.run()
    expected = expected_output(pair.decode.engine.messages["second"])
    assert pair.decode.tokens("first") == pair.decode.tokens("second") == expected
    pair.assert_clean()
