"""A model with states between two engines of one process: every way in which a state goes over, and faults on the way.

The fake model has a wrong token wherever a state is not that of the tokens before (`fake_states`).
"""

import pytest

from tandem_engine.config import HostConfig, WritePolicy
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import PrefixFetch
from tandem_engine.messages.transfer import STATES
from tandem_testing.disagg_pair import Pair, make_pair
from tandem_testing.fake_executors import LateExecutor
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

LENGTHS = (64, 65, 129)
WITHIN_S = 1.0
HYBRID = {"anchors": 4, "usable_pages": 120, "context_length": 400}


def prompt_of(tokens: int) -> tuple[int, ...]:
    return tuple(1 + (7 * n) % 60 for n in range(tokens))


def hybrid_pair(**settings: object) -> Pair:
    return make_pair(**{**HYBRID, **settings})


def finish(pair: Pair) -> None:
    pair.run()
    pair.decode.engine.assert_expected()
    pair.assert_clean()


def fetch(pair: Pair, rid: str, tokens: int) -> int | None:
    """By the prefill engine from the decode engine. Returns the tokens that were cached then."""
    asked = PrefixFetch(peer=pair.decode.peer, tokens=tokens, within_s=WITHIN_S)
    pair.prefill.engine.add(make_message(rid, prompt_of(tokens), fetch=asked, max_tokens=4))
    pair.run()
    pair.prefill.engine.assert_expected()
    pair.assert_clean()
    return pair.prefill.engine.received[rid].outputs[0].cached_tokens


def serve_there(pair: Pair, tokens: int, rid: str = "there") -> None:
    pair.decode.engine.add(make_message(rid, prompt_of(tokens), max_tokens=4))
    pair.decode.engine.run()


def test_fake_model_sees_a_state_of_another_length():
    engine = make_engine(**HYBRID)
    engine.add(make_message("r", prompt_of(70), max_tokens=8))
    engine.step(2)
    engine.model.states.bytes_view()[1:] = 0
    engine.run()
    with pytest.raises(AssertionError):
        engine.assert_expected()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_state_is_handed_over_with_its_pages(tokens, overlap):
    pair = hybrid_pair(enable_overlap=overlap)
    for number in range(2):
        pair.submit(f"r{number}", prompt_of(tokens), max_tokens=70)
        finish(pair)
    assert pair.decode.stage.counters.committed == 2


def provisional(engine: Engine) -> int:
    assert engine.memory.anchors is not None
    return engine.memory.anchors.counts.provisional


@pytest.mark.parametrize("overlap", [False, True])
def test_second_prompt_is_handed_over_after_a_trial(overlap):
    """It leaves the first after 210 tokens and continues after 128, where that had a provisional state."""
    pair = hybrid_pair(enable_overlap=overlap, anchors=8)
    pair.submit("first", prompt_of(300), max_tokens=8)
    finish(pair)
    assert provisional(pair.prefill.engine) == 1
    pair.submit("second", (*prompt_of(210), *range(1, 60)), max_tokens=70)
    finish(pair)
    assert pair.decode.stage.counters.committed == 2
    assert pair.prefill.engine.scheduler.tally.cached_tokens == 128
    assert pair.prefill.engine.scheduler.tally.unusable_tokens == 208 - 128
    assert provisional(pair.prefill.engine) == 0


def test_chunk_that_is_pushed_early_takes_no_state_along():
    pair = hybrid_pair(chunked_prefill_size=32, enable_overlap=True)
    pair.submit("r", prompt_of(150), max_tokens=8)
    finish(pair)


@pytest.mark.parametrize("group", [0, STATES])
def test_state_or_page_that_arrives_wrong_is_not_decoded_from(group):
    pair = hybrid_pair()
    pair.fabric.fates = lambda push: Fate(corrupt=push.key.group == group)
    pair.submit("r", prompt_of(70), max_tokens=8)
    pair.run()
    ended = pair.decode.finish("r")
    assert ended is not None
    assert (ended.reason, ended.retryable) == (FinishReason.ERROR, True)
    assert pair.decode.stage.counters.digest_mismatches == 1
    pair.assert_clean()


@pytest.mark.parametrize("lost", [False, True])
def test_state_that_is_not_pushed_ends_the_handoff(lost):
    pair = hybrid_pair()
    pair.fabric.fates = lambda push: Fate(fail=push.key.group == STATES and not lost, lose_peer=lost)
    pair.submit("r", prompt_of(70), max_tokens=8)
    for _ in range(40):
        pair.turn()
        pair.pass_time(1.0)
    ended = pair.decode.finish("r")
    assert ended is not None
    assert ended.reason is FinishReason.ERROR


@pytest.mark.parametrize("tokens", LENGTHS)
def test_prefix_is_fetched_up_to_an_anchor(tokens):
    pair = hybrid_pair()
    serve_there(pair, tokens)
    usable = (tokens - 1) // 64 * 64
    assert fetch(pair, "here", tokens) == usable
    counters = pair.prefill.stage.prefixes.counters
    assert (counters.fetched, counters.failed) == (int(usable > 0), 0)
    assert fetch(pair, "again", tokens) == usable
    assert counters.fetched == int(usable > 0)


def test_prefix_is_fetched_up_to_a_trial_state():
    pair = hybrid_pair(anchors=8)
    serve_there(pair, 300)
    assert provisional(pair.decode.engine) == 1
    assert fetch(pair, "here", 200) == 128
    assert provisional(pair.decode.engine) == 0


def test_prefix_with_corrupted_state_is_recomputed():
    pair = hybrid_pair()
    serve_there(pair, 150)
    pair.fabric.fates = lambda push: Fate(corrupt=push.key.group == STATES)
    assert fetch(pair, "here", 150) == 0
    assert pair.prefill.stage.prefixes.counters.digest_mismatches == 1
    assert not pair.prefill.engine.memory.landings


def test_prefix_that_is_not_there_gives_its_slot_back():
    pair = hybrid_pair()
    assert fetch(pair, "here", 150) == 0
    assert pair.prefill.stage.prefixes.counters.missed == 1
    assert not pair.prefill.engine.memory.landings


def test_peer_is_asked_after_steps_that_used_the_slot():  # [page-fence]
    pair = hybrid_pair(prefill={"executor": LateExecutor, "enable_overlap": True})
    serve_there(pair, 150)
    engine, fetcher = pair.prefill.engine, pair.prefill.stage.prefixes.fetcher
    engine.add(make_message("running", prompt_of(20), max_tokens=60))
    engine.step(4)
    asked = PrefixFetch(peer=pair.decode.peer, tokens=150, within_s=WITHIN_S)
    engine.add(make_message("here", prompt_of(150), fetch=asked, max_tokens=4))
    [fetching] = fetcher._fetches.values()
    assert fetching.touched is not None
    assert not engine.memory.untouched(fetching.touched)
    assert not pair.network.in_flight()
    pair.run()
    engine.assert_expected()
    pair.assert_clean()
    assert fetcher.counters.fetched == 1


def test_prefix_is_fetched_from_host_memory_with_its_state():
    host = HostConfig(enable_cache=True, write_policy=WritePolicy.WRITE_BACK)
    pair = hybrid_pair(decode={"host_pages": 200, "host": host, "usable_pages": 60})
    serve_there(pair, 150)
    pair.decode.engine.add(make_message("other", (*range(1, 60), *prompt_of(150)), max_tokens=4))
    pair.decode.engine.run()
    assert fetch(pair, "here", 150) == 128


def test_retractions_and_swaps_lose_no_state():
    host = HostConfig(enable_cache=True, swap_bytes=1 << 14)
    engine = make_engine(
        **HYBRID, host_pages=400, host=host, enable_overlap=True, force_retract_every=3, max_retractions=1000
    )
    for number in range(4):
        engine.add(make_message(f"r{number}", prompt_of(60 + 30 * number), max_tokens=40))
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
