"""Lengths follow acceptance, and end where drafts do not pay."""

from itertools import pairwise

from tandem_engine.speculative.lengths import FIRST_PAUSE, LONGEST_PAUSE, Acceptance, DraftLengths
from tandem_engine.speculative.step_costs import StepCosts


def teach(lengths: DraftLengths, acceptance: Acceptance, *, right: int, rounds: int) -> list[int]:
    """Lengths chosen when in every step the first `right` drafts are right; one token follows."""
    seq_len, chosen = 0, []
    for _ in range(rounds):
        drafted = lengths.choose(acceptance, seq_len=seq_len, batch=1)
        accepted = min(right, drafted)
        chosen.append(drafted)
        if drafted:
            lengths.learn(acceptance, drafted=drafted, accepted=accepted, seq_len=seq_len, batch=1)
        seq_len += accepted + 1
    return chosen


def test_drafts_that_are_right_get_longer_up_to_the_bound():
    chosen = teach(DraftLengths(longest=6), Acceptance(), right=6, rounds=30)
    assert chosen[-1] == 6
    assert chosen == sorted(chosen)


def test_half_right_drafts_are_shorter_than_right_ones():
    lengths = DraftLengths(longest=8)
    chosen = teach(lengths, Acceptance(), right=1, rounds=200)
    assert 1 <= max(chosen[50:]) < 8


def test_drafts_that_are_never_right_stop_and_are_seldom_tried_again():
    chosen = teach(DraftLengths(longest=8), Acceptance(), right=0, rounds=2000)
    tried = [step for step, length in enumerate(chosen) if length]
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert chosen[-FIRST_PAUSE:].count(0) >= FIRST_PAUSE - 1
    assert max(gaps) == LONGEST_PAUSE
    assert len(tried) < 30


def test_a_probe_that_is_right_ends_the_pause():
    lengths, acceptance = DraftLengths(longest=4), Acceptance()
    teach(lengths, acceptance, right=0, rounds=100)
    assert lengths.choose(acceptance, seq_len=acceptance.paused_until - 1, batch=1) == 0
    for _ in range(3):
        seq_len = acceptance.paused_until
        drafted = lengths.choose(acceptance, seq_len=seq_len, batch=1)
        assert drafted >= 1
        lengths.learn(acceptance, drafted=drafted, accepted=drafted, seq_len=seq_len, batch=1)
    assert lengths.choose(acceptance, seq_len=seq_len + 1, batch=1) >= 1
    assert acceptance.pause == FIRST_PAUSE


def costing(price: float) -> StepCosts:
    costs = StepCosts()
    costs.plain(1, compute_s=1.0)
    costs.drafted(1, 1, propose_s=price, longest=1, compute_s=1.0)
    return costs


def test_dear_drafts_need_a_better_rate():
    cheap, dear = DraftLengths(longest=8, costs=costing(0.05)), DraftLengths(longest=8, costs=costing(0.8))
    acceptance = Acceptance(rate=0.6)
    assert cheap.choose(acceptance, seq_len=0, batch=1) > 1
    dear.learn(acceptance, drafted=1, accepted=0, seq_len=0, batch=1)
    assert dear.choose(acceptance, seq_len=1, batch=1) == 0


def test_drafts_that_cost_a_step_each_are_not_even_tried():
    assert not DraftLengths(longest=4, costs=costing(1.0)).open(1)
    assert DraftLengths(longest=4, costs=costing(1.0), adaptive=False).open(1)
    assert DraftLengths(longest=4, costs=costing(0.5)).open(1)


def test_lengths_that_do_not_adapt_stay():
    assert set(teach(DraftLengths(longest=5, adaptive=False), Acceptance(), right=0, rounds=50)) == {5}
