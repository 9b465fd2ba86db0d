"""Queues much longer than any lease: every request is handed over in the end, and no page is written to too late."""

import random

import pytest

from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.transport import Push
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.transfer import GrantsRenewed, StillOpen
from tandem_testing.disagg_pair import Pair, make_pair
from tandem_testing.fake_transport import Fate

LEASE = 2.0
CONFIG = DisaggConfig(grant_timeout=LEASE, hold_timeout=LEASE, drain_timeout=LEASE)
TURN_SECONDS = 0.2
REQUESTS = 60
TINY = {"usable_pages": 16, "max_rows": 6, "max_running_requests": 4, "chunked_prefill_size": 4}


def make_tiny_pair(**engine: object) -> Pair:
    return make_pair(config=CONFIG, **{**TINY, "enable_overlap": True, **engine})


def get_acquainted(pair: Pair) -> None:
    """One request is handed over in peace: the writer can date grants from then on."""
    pair.submit("before", (1, 2, 3), max_tokens=2)
    run(pair)
    assert pair.decode.stage.counters.committed == 1


def submit_all(pair: Pair, dice: random.Random, *, skew: int = 0) -> list[str]:
    """All at once. `skew` is by how many places the order may differ between the engines."""
    rids = [f"r{i}" for i in range(REQUESTS)]
    prompts = {rid: tuple(dice.randrange(1, 90) for _ in range(dice.randrange(1, 20))) for rid in rids}
    lengths = {rid: dice.randrange(2, 16) for rid in rids}
    for submit in (pair.submit_prefill, pair.submit_decode):
        for _, rid in sorted((place + dice.randint(0, skew), rid) for place, rid in enumerate(rids)):
            submit(rid, prompts[rid], max_tokens=lengths[rid])
    return rids


def watch_writes(pair: Pair) -> None:
    """Fail when a push starts after its receiver stopped waiting for it, or a grant outlives its hold
    [grant-expiry]."""

    def fate(push: Push) -> Fate:
        hold = next((hold for key, hold in holds() if (key.room, key.generation) == named(push)), None)
        if hold is not None and not hold.state.owns_pages:
            assert pair.decode.engine.clock.time < hold.deadline, f"{push.key} starts after {hold.deadline}"
        return Fate(delay=len(named(push)[0]) % 3)

    def named(push: Push) -> tuple[str, int]:
        return push.key.room, push.key.generation

    def holds():
        table = pair.decode.stage.decode.holds
        return [(key, table.get(key)) for key in pair.prefill.stage.prefill.rooms if key in table]

    pair.fabric.fates = fate


def assert_no_grant_outlives_its_hold(pair: Pair) -> None:
    for key, room in pair.prefill.stage.prefill.rooms.items():
        hold = pair.decode.stage.decode.holds.get(key)
        if room.grant is not None and hold is not None and not hold.state.owns_pages:
            assert room.grant.expires <= hold.deadline, f"room {key}"


def run(pair: Pair, max_turns: int = 6000) -> None:
    for _ in range(max_turns):
        if pair.at_rest():
            return
        pair.turn()
        assert_no_grant_outlives_its_hold(pair)
        pair.pass_time(TURN_SECONDS)
    raise AssertionError("not at rest")


ENGINES = {
    "plain": {},
    "mixed": {"enable_mixed_chunk": True},
    "no radix": {"radix": False},
    "prefill is slow": {"prefill": {"max_running_requests": 1, "max_prefill_tokens": 4}},
    "decode is slow": {"decode": {"max_running_requests": 1}},
    "prefill is small": {"prefill": {"usable_pages": 10}},
    "decode is small": {"decode": {"usable_pages": 10}},
}


@pytest.mark.parametrize("engines", ENGINES)
def test_every_request_of_a_long_queue_is_handed_over(engines):
    pair = make_pair(config=CONFIG, **merged(ENGINES[engines]))
    rids = submit_all(pair, random.Random(engines))
    watch_writes(pair)
    run(pair)
    assert pair.decode.engine.clock.time > 10 * LEASE
    for rid in rids:
        assert pair.decode.tokens(rid) == pair.expected(rid)
    assert pair.prefill.stage.counters.failed == pair.decode.stage.counters.failed == 0
    pair.assert_clean()


def merged(engines: dict[str, object]) -> dict[str, object]:
    """`TINY` for both, with what one of them has instead."""
    both = {**TINY, "enable_overlap": True}
    sides = {side: {**both, **engines.get(side, {})} for side in ("prefill", "decode")}
    shared = {name: value for name, value in engines.items() if name not in sides}
    return {side: {**settings, **shared} for side, settings in sides.items()}


@pytest.mark.parametrize("seed", range(4))
def test_late_and_lost_renewals_never_allow_a_late_write(seed):  # [late-write] [grant-expiry]
    dice = random.Random(seed)
    pair = make_tiny_pair()
    get_acquainted(pair)
    rids = submit_all(pair, dice)
    pair.network.lost = lambda message: isinstance(message, StillOpen | GrantsRenewed) and dice.random() < 0.4
    pair.network.delay = lambda message: dice.randrange(15) if isinstance(message, StillOpen | GrantsRenewed) else 0
    watch_writes(pair)
    run(pair)
    assert_right_or_retryable(pair, rids)
    assert pair.decode.stage.counters.failed > 0
    assert pair.decode.stage.counters.committed > 1


@pytest.mark.parametrize("seed", range(4))
def test_queues_in_different_order_on_each_side_finish(seed):
    pair = make_tiny_pair()
    rids = submit_all(pair, random.Random(seed), skew=12)
    watch_writes(pair)
    run(pair)
    assert_right_or_retryable(pair, rids)


def assert_right_or_retryable(pair: Pair, rids: list[str]) -> None:
    for rid in rids:
        finish, tokens, expected = pair.decode.finish(rid), pair.decode.tokens(rid), pair.expected(rid)
        assert finish is not None, f"{rid} ended without a word"
        assert tokens == expected[: len(tokens)], f"{rid}: {tokens} instead of {expected}"
        assert finish.retryable if finish.reason is FinishReason.ERROR else tokens == expected
    pair.assert_clean()
