"""The self-test of links: what is measured, what it may take, and what becomes of its pages."""

import dataclasses
from random import Random

import msgspec
import pytest

from tandem_engine.base.names import LinkTransport
from tandem_engine.disaggregation.link_probe import SPARE_SHARE
from tandem_engine.disaggregation.links import FIRST_WITHIN_S, JITTER, REPEAT_S, RETRY_S
from tandem_engine.disaggregation.peers import MAX_CHANNELS
from tandem_engine.messages.stats import LinkReport
from tandem_engine.messages.transfer import DrainAck, Hello, ProbeGrant, ProbeRefusal, ProbeRequest
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import CONFIG, Pair, Side, make_pair
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import VOCAB

PAGE_S = 0.001
SECONDS_PER_PAGE = 0.0001


def by_size(push) -> Fate:
    """A millisecond for whatever it is, and a tenth of one for each page."""
    return Fate(seconds=PAGE_S + SECONDS_PER_PAGE * (push.key.count - 1))


def measured_pair(fate=by_size, **settings: object) -> Pair:
    if not {"prefill", "decode"} & settings.keys():
        settings["usable_pages"] = 400
    pair = make_pair(**settings)
    pair.fabric.fates = fate
    return pair


def meet(pair: Pair) -> None:
    """The worker services name the peers to each other."""
    pair.prefill.stage.links.meet([pair.decode.peer])
    pair.decode.stage.links.meet([pair.prefill.peer])


def link(side: Side) -> LinkReport:
    (report,) = side.stage.links.reports()
    return report


def settle(pair: Pair, *, seconds: float = FIRST_WITHIN_S, turns: int = 30) -> None:
    pair.pass_time(seconds)
    pair.turn(turns)


def test_peers_that_meet_measure_the_link_in_both_directions():
    pair = measured_pair()
    meet(pair)
    settle(pair)
    settle(pair, seconds=RETRY_S * (1 + JITTER))  # both asked at the same time: one was refused
    for side in (pair.prefill, pair.decode):
        assert link(side).latency_s == PAGE_S
        assert link(side).bytes_per_s > 0
        assert link(side).problem == ""
        assert len(side.link.messages(Hello)) >= 1
    pair.assert_clean()


def test_rate_is_that_of_the_largest_write_without_its_latency():
    pair = measured_pair()
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    (grant,) = pair.decode.link.messages(ProbeGrant)
    pages, page_bytes = len(grant.pages), pair.prefill.engine.model.pool.page_bytes
    expected = pages * page_bytes / (SECONDS_PER_PAGE * (pages - 1))
    assert link(pair.prefill).bytes_per_s == pytest.approx(expected, rel=0.01)


def test_links_are_not_measured_before_peers_are_set():
    pair = measured_pair()
    settle(pair, seconds=REPEAT_S * 2)
    assert pair.prefill.stage.links.reports() == ()
    assert not pair.prefill.link.sent


def test_link_test_uses_few_free_pages_and_releases_them():
    pair = measured_pair(lambda _push: Fate(delay=3, seconds=PAGE_S))
    free = {id(side): side.engine.memory.allocator.available for side in (pair.prefill, pair.decode)}
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair, turns=3)
    for side in (pair.prefill, pair.decode):
        held = len([*side.stage.held_pages()])
        assert 1 <= held <= free[id(side)] // SPARE_SHARE
        assert side.engine.scheduler.audit().problems == ()
    settle(pair, seconds=0)
    pair.assert_clean()


def test_self_test_waits_while_memory_is_short():
    pair = measured_pair(prefill={"usable_pages": 400}, decode={"usable_pages": SPARE_SHARE - 1})
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    assert [refusal.reason for refusal in pair.decode.link.messages(ProbeRefusal)] == ["memory is short"]
    assert link(pair.prefill).problem == "refused: memory is short"
    assert link(pair.prefill).bytes_per_s == 0
    settle(pair, seconds=RETRY_S * (1 + JITTER))
    assert len(pair.prefill.link.messages(ProbeRequest)) == 2
    pair.assert_clean()


def test_links_are_measured_with_prefix_cache_filling_memory():
    """Every worker's has in time: its links, and those to it from a worker that has just started, had no figure."""
    pair = measured_pair()
    for number in range(20):
        pair.submit(f"r{number}", Random(number).choices(range(1, VOCAB), k=99))
        pair.run()
    for side in (pair.prefill, pair.decode):
        assert side.engine.memory.allocator.available < SPARE_SHARE
    meet(pair)
    settle(pair)
    settle(pair, seconds=RETRY_S * (1 + JITTER))
    for side in (pair.prefill, pair.decode):
        assert link(side).problem == ""
        assert link(side).latency_s == PAGE_S
    pair.assert_clean()


def test_transport_of_peer_is_kept_from_hello_before_set_peers():
    """It greets once, with its first grant: that may be before this worker's service has seen it in the registry."""
    pair = measured_pair()
    for side in (pair.prefill, pair.decode):
        side.transport.facts = {"machine": "m1", "transports": (LinkTransport.SHM,)}
    pair.submit("early")
    pair.run()
    pair.prefill.stage.links.meet([pair.decode.peer])
    assert link(pair.prefill).transport is LinkTransport.SHM
    pair.submit("late")
    pair.run()
    assert link(pair.prefill).bytes_per_s > 0
    assert not pair.prefill.link.messages(ProbeRequest)
    assert link(pair.prefill).transport is LinkTransport.SHM


def test_records_of_greeting_peers_are_bounded_and_removed():
    side = make_pair().prefill
    links, greeting = side.stage.links, side.transport.hello()
    for number in range(MAX_CHANNELS + 3):
        links.on_peer(msgspec.structs.replace(greeting, sender=make_peer(f"peer-{number}")))
    assert len(links._transports) == MAX_CHANNELS
    newest = make_peer(f"peer-{MAX_CHANNELS + 2}").incarnation
    assert newest in links._transports
    links.peer_gone(newest)
    assert newest not in links._transports


def test_requests_during_link_test_have_correct_output():
    pair = measured_pair(lambda push: Fate(delay=1, seconds=PAGE_S * push.key.count))
    meet(pair)
    rids = []
    for number in range(8):
        rids.append(pair.submit(f"r{number}", range(number + 1, number + 20)))
        settle(pair, seconds=0.5, turns=2)
    pair.run()
    settle(pair)
    assert [pair.decode.tokens(rid) for rid in rids] == [pair.expected(rid) for rid in rids]
    assert link(pair.prefill).bytes_per_s > 0
    pair.assert_clean()


def test_pushes_of_requests_keep_the_rate_current():
    pair = measured_pair()
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    before = link(pair.prefill).bytes_per_s
    pair.fabric.fates = lambda _push: Fate(seconds=10.0)
    pair.submit(prompt=range(1, 60))
    pair.run()
    assert link(pair.prefill).bytes_per_s < before / 100


def test_link_in_use_is_not_tested_again_and_a_silent_one_is():
    pair = measured_pair()
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    pair.pass_time(REPEAT_S * 0.9)
    pair.submit()
    pair.run()
    settle(pair, seconds=REPEAT_S * 0.9)
    assert len(pair.prefill.link.messages(ProbeRequest)) == 1
    settle(pair, seconds=REPEAT_S * (1 + JITTER))
    assert len(pair.prefill.link.messages(ProbeRequest)) == 2


def test_unreachable_peer_marks_link_broken_until_recovery():
    pair = measured_pair(lambda _push: Fate(lose_peer=True))
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    assert link(pair.prefill).broken
    assert link(pair.prefill).problem.startswith("a write failed")
    pair.fabric.fates = by_size
    settle(pair, seconds=RETRY_S * (1 + JITTER))
    assert not link(pair.prefill).broken
    assert link(pair.prefill).bytes_per_s > 0
    pair.assert_clean()


def test_peer_that_does_not_answer_is_no_broken_link():  # it may be of a release that knows no self-tests
    pair = measured_pair()
    pair.network.lost = lambda message: isinstance(message, ProbeRequest)
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    settle(pair, seconds=6.0)
    assert link(pair.prefill).problem == "no answer"
    assert not link(pair.prefill).broken
    pair.assert_clean()


def test_link_test_pages_stay_held_until_writer_ack():  # [late-write]
    pair = measured_pair()
    pair.network.lost = lambda message: isinstance(message, DrainAck)
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair)
    assert [*pair.decode.stage.held_pages()]
    settle(pair, seconds=CONFIG.drain_timeout)
    assert pair.decode.stage.quarantined_pages() > 0
    pair.network.lost = lambda _message: False
    settle(pair, seconds=CONFIG.drain_timeout)
    pair.assert_clean()


def test_dead_writer_is_fenced_out_of_the_pages_it_was_granted():  # [dead-peer-released]
    pair = measured_pair(lambda _push: Fate(delay=5))
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair, turns=3)
    pair.fabric.kill(pair.prefill.peer.incarnation)
    pair.network.kill(pair.prefill.peer.incarnation)
    pair.decode.stage.peer_gone(pair.prefill.peer.incarnation)
    assert [*pair.decode.stage.held_pages()]
    pair.decode.stage.peer_ended(pair.prefill.peer.incarnation)
    pair.decode.assert_clean()


def test_dead_receiver_ends_the_self_test_and_its_link():
    pair = measured_pair(lambda _push: Fate(delay=50))
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair, turns=3)
    pair.prefill.stage.peer_gone(pair.decode.peer.incarnation)
    pair.prefill.step(2)
    assert pair.prefill.stage.links.reports() == ()
    pair.prefill.assert_clean()


def test_receiver_reclaims_link_test_pages_after_last_write():  # [late-write] [ack-per-grant]
    pair = measured_pair(lambda push: Fate(delay=0 if push.key.count == 1 else 40, seconds=PAGE_S))
    pair.prefill.stage.links.meet([pair.decode.peer])
    settle(pair, turns=12)
    settle(pair, seconds=CONFIG.drain_timeout, turns=2)
    assert pair.fabric.in_flight()
    assert [*pair.decode.stage.held_pages()]
    settle(pair, seconds=0, turns=60)
    pair.assert_clean()


def test_link_slower_than_expected_sets_condition_and_logs_once(caplog):
    pair = measured_pair(config=dataclasses.replace(CONFIG, expect_transport=LinkTransport.RDMA))
    facts = {"machine": "m1", "transports": (LinkTransport.TCP,)}
    for side in (pair.prefill, pair.decode):
        side.transport.facts = facts | ({"machine": "m2"} if side is pair.decode else {})
    pair.prefill.stage.links.meet([pair.decode.peer])
    for _ in range(3):
        settle(pair, seconds=REPEAT_S * 2)
    assert link(pair.prefill).transport is LinkTransport.TCP
    assert link(pair.prefill).condition == "expected rdma, got tcp"
    assert len([record for record in caplog.records if "expected rdma" in record.getMessage()]) == 1


def test_self_tests_can_be_turned_off():
    pair = measured_pair(config=dataclasses.replace(CONFIG, link_probe_mib=0))
    meet(pair)
    settle(pair, seconds=REPEAT_S)
    assert not pair.prefill.link.messages(ProbeRequest)
    pair.submit()
    pair.run()
    assert link(pair.prefill).bytes_per_s > 0


def test_peers_get_their_turns_in_the_order_of_their_naming():  # [same-collectives]
    """Every rank of an engine draws the same times for the same peers; a set has another order in each process."""
    side = make_pair().prefill
    peers = [make_peer(f"peer-{i}") for i in range(20)]
    links = side.stage.links
    links.meet(peers)
    draws = Random(side.peer.incarnation)
    assert [links._links[peer.incarnation].due for peer in peers] == [
        side.engine.clock.now() + draws.uniform(0.0, FIRST_WITHIN_S) for _ in peers
    ]
