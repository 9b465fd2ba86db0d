"""A prefix that one engine has cached is brought to another that is about to compute it; both ends, and every end."""

from dataclasses import replace

import msgspec
import pytest

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.names import RequestId
from tandem_engine.config import HostConfig, Role
from tandem_engine.disaggregation.digest import unproved
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import CacheHits, FetchReport, FinishReason
from tandem_engine.messages.requests import Peer, PrefixFetch
from tandem_engine.messages.transfer import DrainAck, Hello, PrefixAsk, PrefixRecord, TransferAborted
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import CONFIG, DRAIN_TIMEOUT, Pair, make_pair
from tandem_testing.fake_transport import FakeTransport, Fate
from tandem_testing.scheduler_builders import ADAPTER, make_message
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

PREFIX = tuple(range(1, 17))
"""Four pages of four tokens."""
PROMPT = (*PREFIX, 50, 51)
WITHIN_S = 1.0


def ask(pair: Pair, rid: str = "r", prompt=PROMPT, *, peer: Peer | None = None, tokens: int = 100, **request) -> None:
    """A request for the prefill engine whose source is the decode engine."""
    fetch = PrefixFetch(peer=peer or pair.decode.peer, tokens=tokens, within_s=WITHIN_S)
    pair.prefill.engine.add(make_message(rid, prompt, fetch=fetch, **request))


def warm(pair: Pair, prompt=PREFIX, **request) -> None:
    """Have the decode engine compute `prompt`, so that it is cached there."""
    pair.decode.engine.add(make_message("warm", prompt, max_tokens=2, **request))
    pair.decode.engine.run()


def make_warm_pair(**settings) -> Pair:
    pair = make_pair(**settings)
    warm(pair)
    return pair


def cached_tokens(pair: Pair, rid: str = "r") -> int | None:
    return pair.prefill.engine.received[rid].outputs[0].cached_tokens


def cache_hits(pair: Pair, rid: str = "r") -> CacheHits | None:
    return pair.prefill.engine.received[rid].outputs[0].cache_hits


def report(pair: Pair, rid: str = "r") -> FetchReport | None:
    return pair.prefill.engine.received[rid].outputs[0].fetch


def counters(pair: Pair):
    return pair.prefill.stage.prefixes.counters


def finish(pair: Pair) -> None:
    pair.run()
    pair.prefill.engine.assert_expected()
    pair.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_fetched_prefix_is_used_and_the_rest_computed(overlap):
    pair = make_warm_pair(enable_overlap=overlap)
    ask(pair)
    finish(pair)
    assert cached_tokens(pair) == len(PREFIX)
    page_bytes = pair.prefill.engine.model.pool.page_bytes
    assert report(pair) == FetchReport(peer="d@1", pages=4, bytes=4 * page_bytes, wait_s=0.0)
    assert (counters(pair).fetched, counters(pair).pages, counters(pair).failed) == (1, 4, 0)
    assert cache_hits(pair) == CacheHits(fetched=16)
    source = pair.decode.stage.prefixes.counters
    assert (source.served, source.served_pages) == (1, 4)


def test_fetched_prefix_serves_the_next_request():
    pair = make_warm_pair()
    ask(pair, "first")
    pair.run()
    ask(pair, "second")
    finish(pair)
    assert cached_tokens(pair, "second") == len(PREFIX)
    assert cache_hits(pair, "second") == CacheHits(), "by now it is on the device"
    assert (counters(pair).asked, counters(pair).skipped) == (1, 1)


def test_prefix_fetch_transfers_only_uncached_pages():
    pair = make_warm_pair()
    pair.prefill.engine.add(make_message("half", PREFIX[:8], max_tokens=1))
    pair.prefill.engine.run()
    ask(pair)
    finish(pair)
    (asked,) = pair.prefill.link.messages(PrefixAsk)
    assert (asked.grant.first_token, len(asked.grant.pages)) == (8, 2)
    assert (cached_tokens(pair), cache_hits(pair)) == (len(PREFIX), CacheHits(fetched=8))


def test_output_kv_is_fetched_from_the_decode_worker_for_the_next_turn():
    pair = make_pair()
    pair.submit("one", PREFIX, max_tokens=12)
    pair.run()
    answer = pair.expected("one")
    turn = (*PREFIX, *answer, 60, 61, 62)
    ask(pair, "two", turn)
    pair.run()
    assert cached_tokens(pair, "two") == (len(PREFIX) + 11) // 4 * 4  # the last token has no KV
    assert report(pair, "two").pages > 0
    pair.prefill.engine.assert_expected("two")
    pair.assert_clean()


@pytest.mark.parametrize(
    ("fate", "source", "moved"),
    [(Fate(), Role.BOTH, True), (Fate(fail=True), Role.BOTH, False), (Fate(), Role.DECODE, False)],
)
def test_served_prefix_is_evicted_before_older_ones(fate, source, moved):
    pair = make_warm_pair()
    pair.decode.stage.prefixes.source.role = source
    older = tuple(range(30, 38))
    pair.decode.engine.add(make_message("older", older, max_tokens=2))
    pair.decode.engine.run()
    pair.fabric.fates = lambda _push: fate
    ask(pair)
    finish(pair)
    memory = pair.decode.engine.memory
    assert (memory.cache.peek(PREFIX), memory.cache.peek(older)) == (4, 2)
    memory.give_back(memory.cache.evict(2))
    assert (memory.cache.peek(PREFIX), memory.cache.peek(older)) == ((2, 2) if moved else (4, 0))


def test_fetch_of_partly_evicted_prefix_returns_the_rest():
    pair = make_warm_pair()
    memory = pair.decode.engine.memory
    memory.give_back(memory.cache.evict(2))
    ask(pair)
    pair.turn()
    pair.turn()
    finish(pair)
    assert cached_tokens(pair) == 8
    assert report(pair).pages == 2


def test_fetch_of_evicted_prefix_misses_immediately():
    pair = make_warm_pair()
    pair.decode.engine.memory.clear_cache()
    ask(pair)
    pair.turn(3)
    assert [*pair.prefill.stage.held_pages()] == []
    assert report(pair) == FetchReport(peer="d@1", pages=0, bytes=0, wait_s=0.0)
    finish(pair)
    assert (counters(pair).missed, counters(pair).failed) == (1, 0)
    assert cached_tokens(pair) == 0


def test_other_requests_are_served_during_the_wait():
    pair = make_warm_pair()
    pair.network.delay = lambda _message: 10**9
    ask(pair)
    pair.prefill.engine.add(make_message("other", (90, 91)))
    pair.turn(20)
    assert pair.prefill.finish("other") is not None
    assert pair.prefill.finish() is None
    assert pair.prefill.engine.scheduler.stats().waiting == 1


def test_late_fetch_is_computed_and_pages_wait_for_ack():
    pair = make_warm_pair()
    pair.network.lost = lambda _message: True
    ask(pair)
    pair.turn(2)
    pair.pass_time(WITHIN_S)
    pair.turn(20)
    assert pair.prefill.finish() is not None
    assert counters(pair).failed == 1
    assert len([*pair.prefill.stage.held_pages()]) == 4
    assert report(pair).pages == 0
    pair.pass_time(DRAIN_TIMEOUT)
    pair.turn()
    assert pair.prefill.stage.quarantined_pages() == 4
    assert pair.prefill.stage.quarantined_for() == ("d@1",)
    # The source does not know the room, and replies so once it is reached.
    pair.network.lost = lambda _message: False
    pair.pass_time(DRAIN_TIMEOUT)
    finish(pair)


def test_prefix_fetch_wait_is_bounded_by_engine_timeout():
    pair = make_warm_pair(prefill={"config": replace(CONFIG, prefix_fetch_timeout=0.25)})
    pair.network.delay = lambda _message: 10**9
    ask(pair)
    pair.turn(2)
    pair.pass_time(0.25)
    pair.turn(20)
    assert pair.prefill.finish() is not None


def test_late_fetch_pages_land_in_held_pages():  # [late-write]
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=12)
    ask(pair)
    pair.turn(3)
    assert pair.fabric.in_flight() == 1
    pair.pass_time(WITHIN_S)
    pair.turn(2)
    assert len([*pair.prefill.stage.held_pages()]) == 4  # no ack while a push is outstanding
    finish(pair)
    assert counters(pair).failed == 1


@pytest.mark.parametrize("known", [False, True], ids=["requester's clock unknown", "requester's clock known"])
def test_resumed_source_does_not_write_for_expired_fetches(known):  # [late-write]
    """Half a minute later it is fenced, and the pages that it was granted belong to other requests."""
    pair = make_warm_pair()
    if known:
        ask(pair, "before", (*PREFIX[:8], 70))
        pair.run()
    pair.network.lost = lambda message: isinstance(message, TransferAborted)
    pushed = pair.decode.stage.prefixes.counters.served
    ask(pair)
    for _ in range(3):
        pair.prefill.step()
        pair.network.advance()
    pair.pass_time(30.0)
    pair.prefill.step(5)
    pair.prefill.stage.peer_ended(pair.decode.peer.incarnation)
    assert [*pair.prefill.stage.held_pages()] == []
    for _ in range(3):
        pair.decode.step()
        pair.network.advance()
        assert pair.fabric.in_flight() == 0
    assert pair.decode.stage.prefixes.counters.served == pushed
    assert pair.decode.stage.prefixes.source.transfers, "it waits for a word of the requester"
    pair.pass_time(WITHIN_S)
    pair.decode.step()
    assert not pair.decode.stage.prefixes.source.transfers
    pair.prefill.engine.run()
    pair.prefill.engine.assert_expected("r")


def test_torn_pages_are_never_read():  # [verified-pages]
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(corrupt=True)
    ask(pair)
    finish(pair)
    assert (counters(pair).digest_mismatches, counters(pair).fetched) == (1, 0)
    assert cached_tokens(pair) == 0


def test_pages_of_an_ended_fetch_are_free_once_they_are_unpacked(monkeypatch):  # [late-write]
    """An order to unpack may be carried out after the source has acked: it writes to the pages."""
    orders = []
    monkeypatch.setattr(FakeTransport, "packs", lambda *_: True)
    monkeypatch.setattr(FakeTransport, "digest", lambda transport, order: orders.append((transport, order)))
    pair = make_warm_pair()
    ask(pair)
    pair.turn(10)
    pair.prefill.engine.scheduler.abort(RequestId("r"))
    pair.turn(10)
    assert len(pair.prefill.link.messages(TransferAborted)) == 1
    assert len([*pair.prefill.stage.held_pages()]) == 4
    [(transport, order)] = orders
    assert order.packed
    transport.events.append(unproved(order))
    pair.run()
    assert [*pair.prefill.stage.held_pages()] == []
    pair.assert_clean()


@pytest.mark.parametrize("fate", [Fate(fail=True), Fate(lose_peer=True)])
def test_write_that_fails_ends_the_fetch_at_once(fate):
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: fate
    ask(pair)
    pair.turn(6)
    assert cached_tokens(pair) == 0
    finish(pair)
    assert counters(pair).failed == 1


def test_source_exit_frees_fetch_pages():  # [dead-peer-released]
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=50)
    ask(pair)
    pair.turn(3)
    pair.fabric.kill(pair.decode.peer.incarnation)
    pair.network.kill(pair.decode.peer.incarnation)
    pair.prefill.stage.peer_gone(pair.decode.peer.incarnation)
    assert [*pair.prefill.stage.held_pages()]
    pair.prefill.stage.peer_ended(pair.decode.peer.incarnation)
    assert [*pair.prefill.stage.held_pages()] == []
    pair.prefill.engine.run()
    pair.prefill.engine.assert_expected()
    pair.prefill.assert_clean()


def test_fenced_fetcher_frees_pinned_pages():
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=50)
    ask(pair)
    pair.turn(2)
    assert pair.decode.engine.memory.pins
    pair.decode.stage.peer_gone(pair.prefill.peer.incarnation)
    assert not pair.decode.engine.memory.pins
    pair.decode.step(2)
    pair.decode.assert_clean()


def test_abort_of_fetching_request_releases_both_ends():
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=6)
    ask(pair)
    pair.turn(3)
    pair.prefill.engine.scheduler.abort(RequestId("r"))
    pair.run()
    assert pair.prefill.finish().reason is FinishReason.ABORT
    assert counters(pair).failed == 0
    assert not pair.decode.engine.memory.pins
    pair.assert_clean()


def test_drain_rejects_waiting_request_and_cancels_fetch():
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=6)
    ask(pair)
    pair.turn(3)
    pair.prefill.engine.scheduler.drain()
    pair.run()
    assert pair.prefill.finish().code == "draining"
    pair.assert_clean()


def test_draining_engine_still_serves_fetches():
    pair = make_warm_pair()
    pair.decode.engine.scheduler.drain()
    ask(pair)
    finish(pair)
    assert cached_tokens(pair) == len(PREFIX)


def test_paused_engine_still_serves_fetches():
    pair = make_warm_pair()
    pair.decode.engine.scheduler.pause(PauseMode.IN_PLACE)
    ask(pair)
    finish(pair)
    assert cached_tokens(pair) == len(PREFIX)


def test_lost_fetch_request_is_acked_by_source():  # [ack-per-grant]
    pair = make_warm_pair()
    pair.network.lost = lambda message: isinstance(message, PrefixAsk)
    ask(pair)
    pair.turn(2)
    pair.pass_time(WITHIN_S)
    pair.turn(2)
    assert len(pair.decode.link.messages(DrainAck)) == 1
    assert [*pair.prefill.stage.held_pages()] == []
    finish(pair)


def test_question_that_comes_after_its_end_is_not_served():  # [ack-per-grant]
    pair = make_warm_pair()
    pair.network.delay = lambda message: 6 if isinstance(message, PrefixAsk) else 0
    ask(pair)
    pair.turn(2)
    pair.pass_time(WITHIN_S)
    finish(pair)
    assert not pair.decode.link.messages(PrefixRecord)
    assert pair.decode.stage.prefixes.counters.ignored == 1


def test_salts_are_not_crossed():
    pair = make_pair()
    warm(pair, cache_salt="tenant-a")
    ask(pair, "b", cache_salt="tenant-b")
    pair.run()
    assert cached_tokens(pair, "b") == 0
    ask(pair, "a", cache_salt="tenant-a")
    finish(pair)
    assert cached_tokens(pair, "a") == len(PREFIX)


def test_prefixes_of_adapters_are_not_crossed():
    pair = make_pair()
    warm(pair)
    ask(pair, "adapted", adapter=ADAPTER)
    pair.run()
    assert cached_tokens(pair, "adapted") == 0
    pair.decode.engine.add(make_message("warm-adapted", PREFIX, max_tokens=2, adapter=ADAPTER))
    pair.decode.engine.run()
    ask(pair, "again", [*PREFIX, 5, 5], adapter=ADAPTER)
    finish(pair)
    assert cached_tokens(pair, "again") > 0


def test_record_that_names_no_adapter_ends_a_fetch_of_one():
    """A writer of a release without adapters has written what the base model has computed."""
    pair = make_warm_pair()
    pair.decode.engine.add(make_message("warm-adapted", PREFIX, max_tokens=2, adapter=ADAPTER))
    pair.decode.engine.run()
    pair.fabric.fates = lambda _push: Fate(delay=5)
    ask(pair, adapter=ADAPTER)
    pair.turn(2)
    (asked,) = pair.prefill.link.messages(PrefixAsk)
    assert asked.adapter == asked.grant.adapter == ADAPTER.digest
    record = PrefixRecord(
        room=asked.grant.room, generation=asked.grant.generation, sender=pair.decode.peer, pages=4, digests=(1, 2, 3, 4)
    )
    pair.decode.link.send(pair.prefill.peer, record)
    pair.turn()
    assert counters(pair).failed == 1
    finish(pair)
    assert cached_tokens(pair) == 0


def test_fetch_with_grant_of_other_adapter_is_rejected():
    pair = make_warm_pair()
    ask(pair, adapter=ADAPTER)
    (asked,) = pair.prefill.link.messages(PrefixAsk)
    grant = msgspec.structs.replace(asked.grant, room="crossed", adapter=b"")
    pair.prefill.link.send(pair.decode.peer, msgspec.structs.replace(asked, grant=grant))
    pair.turn(3)
    refused = [each for each in pair.decode.link.messages(TransferAborted) if each.room == "crossed"]
    assert [f"here adapter {ADAPTER.digest.hex()}" in each.reason for each in refused] == [True]
    finish(pair)


def test_kv_of_incompatible_shape_is_not_fetched():
    pair = make_warm_pair()
    ask(pair, peer=make_peer("d", compat_hash="shape-2"))
    finish(pair)
    assert not pair.prefill.link.messages(PrefixAsk)
    assert counters(pair).skipped == 1


def test_engine_does_not_fetch_from_itself():
    pair = make_warm_pair()
    ask(pair, peer=pair.prefill.peer)
    finish(pair)
    assert counters(pair).skipped == 1


def test_fetch_from_unreachable_source_is_skipped():
    pair = make_warm_pair()
    pair.prefill.link.unreachable.add(pair.decode.peer.incarnation)
    ask(pair)
    pair.prefill.step(4)
    assert pair.prefill.tokens()
    pair.prefill.link.unreachable.clear()
    pair.pass_time(DRAIN_TIMEOUT)
    finish(pair)


def test_requests_with_the_same_prefix_share_one_fetch():
    pair = make_warm_pair()
    ask(pair, "a")
    ask(pair, "b", (*PREFIX, 70))
    ask(pair, "c", PREFIX[:13])
    finish(pair)
    assert counters(pair).asked == 1
    assert [cached_tokens(pair, rid) for rid in "abc"] == [16, 16, 12]


def test_short_prefix_does_not_stand_in_for_a_long_one():
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=4)
    ask(pair, "short", PREFIX[:5])
    ask(pair, "long")
    finish(pair)
    assert counters(pair).asked == 2
    assert cached_tokens(pair, "long") == 16


def test_choices_of_one_answer_fetch_once():
    pair = make_warm_pair()
    for rid in ("a", "b", "c"):
        ask(pair, rid, group="answer")
    finish(pair)
    assert counters(pair).asked == 1


def test_only_as_much_as_memory_can_spare_is_fetched():
    pair = make_pair(prefill={"usable_pages": 7}, decode={"usable_pages": 64})
    warm(pair)
    pair.prefill.engine.add(make_message("busy", (80, 81), max_tokens=16))
    pair.prefill.step(2)
    ask(pair, max_tokens=1)
    pair.turn()
    assert len([*pair.prefill.stage.held_pages()]) < 4
    finish(pair)
    assert pair.prefill.engine.scheduler.stats().retracted_total == 0


def test_source_serves_only_pages_spare_of_running_requests():
    pair = make_pair(decode={"usable_pages": 9})
    warm(pair)
    pair.decode.engine.add(make_message("busy", (80, 81), max_tokens=30))
    pair.decode.step(3)
    ask(pair)
    pair.turn(3)
    finish(pair)
    assert 0 < cached_tokens(pair) < len(PREFIX)
    assert pair.decode.engine.scheduler.stats().retracted_total == 0


def test_prefix_is_fetched_during_grammar_compilation():
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    pair = make_warm_pair(prefill={"grammars": grammars})
    ask(pair, grammar=spec)
    pair.turn(6)
    assert counters(pair).fetched == 1
    grammars.finish(spec)
    finish(pair)
    assert cached_tokens(pair) == len(PREFIX)


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_cache_reset_at_either_end_cancels_fetch(end):
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=4)
    ask(pair)
    pair.turn(3)
    scheduler = getattr(pair, end).engine.scheduler
    scheduler.forget_kv()
    assert not getattr(pair, end).engine.memory.pins
    finish(pair)
    assert cached_tokens(pair) == 0
    assert counters(pair).fetched == 0


def test_prompt_logprobs_leave_less_to_fetch():  # [logprobs-past-cache]
    pair = make_warm_pair()
    ask(pair, prompt_logprobs=0, logprob_start=6)
    finish(pair)
    assert cached_tokens(pair) == 4


def test_prefix_fetch_serves_host_tier_pages():
    host = {"host_pages": 32, "host": HostConfig(enable_cache=True)}
    pair = make_pair(prefill=host, decode=host)
    warm(pair)
    pair.prefill.engine.add(make_message("half", PREFIX[:8], max_tokens=1))
    pair.run()
    pair.turn(4)
    for side in (pair.prefill, pair.decode):
        memory = side.engine.memory
        memory.give_back(memory.cache.evict(4))
    ask(pair)
    finish(pair)
    (asked,) = pair.prefill.link.messages(PrefixAsk)
    assert asked.grant.first_token == 8
    assert cached_tokens(pair) == len(PREFIX)


def test_engine_without_prefix_cache_fetches_nothing():
    pair = make_warm_pair(prefill={"radix": False})
    ask(pair)
    finish(pair)
    assert counters(pair).skipped == 1


def test_source_without_prefix_cache_misses():
    pair = make_warm_pair(decode={"radix": False})
    ask(pair)
    finish(pair)
    assert counters(pair).missed == 1


@pytest.mark.parametrize("spoilt", ["tokens", "pages", "foreign"])
def test_question_that_makes_no_sense_is_refused(spoilt):
    pair = make_warm_pair()
    ask(pair)
    (good,) = pair.prefill.link.messages(PrefixAsk)
    changed = {
        "tokens": {"tokens": good.tokens[:-3]},
        "pages": {"grant": msgspec.structs.replace(good.grant, pages=good.grant.pages[:2], room="other")},
        "foreign": {"tokens": good.tokens + bytes(4)},
    }[spoilt]
    pair.decode.link.inbox.clear()
    pair.prefill.link.send(pair.decode.peer, msgspec.structs.replace(good, **changed))
    pair.turn()
    assert [message.reason for message in pair.decode.link.messages(TransferAborted)]
    assert not pair.decode.engine.memory.pins


@pytest.mark.parametrize("changes", [{"pages": 9}, {"pages": -1}, {"digests": ()}])
def test_record_that_makes_no_sense_ends_the_fetch(changes):
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=5)
    ask(pair)
    pair.turn(2)
    (asked,) = pair.prefill.link.messages(PrefixAsk)
    record = PrefixRecord(
        room=asked.grant.room, generation=asked.grant.generation, sender=pair.decode.peer, pages=4, digests=(1, 2, 3, 4)
    )
    pair.decode.link.send(pair.prefill.peer, msgspec.structs.replace(record, **changes))
    pair.turn()
    assert counters(pair).failed == 1
    finish(pair)


def test_messages_of_other_peers_do_not_end_a_fetch():
    pair = make_warm_pair()
    pair.fabric.fates = lambda _push: Fate(delay=5)
    ask(pair)
    pair.turn(2)
    foreign = pair.network.join(make_peer("x"))
    (asked,) = pair.prefill.link.messages(PrefixAsk)
    name = {"room": asked.grant.room, "generation": asked.grant.generation, "sender": foreign.me}
    foreign.send(pair.prefill.peer, PrefixRecord(**name, pages=0, digests=()))
    foreign.send(pair.prefill.peer, DrainAck(**name))
    finish(pair)
    assert cached_tokens(pair) == len(PREFIX)


def test_fetch_is_introduced_each_time():
    pair = make_warm_pair()
    ask(pair, "a")
    pair.run()
    pair.prefill.engine.memory.clear_cache()
    pair.decode.transport.forget(pair.prefill.peer.incarnation)
    ask(pair, "b")
    finish(pair)
    assert cached_tokens(pair, "b") == len(PREFIX)
    assert len(pair.prefill.link.messages(Hello)) == 2


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"within_s": 0.0}, {"within_s": float("inf")}])
def test_request_with_invalid_fetch_plan_is_rejected(wrong):
    good = {"peer": make_peer("d"), "tokens": 4, "within_s": 1.0}
    with pytest.raises(InvalidRequestError, match=r"fetch\."):
        PrefixFetch(**{**good, **wrong}).check()
