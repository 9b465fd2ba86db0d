"""A reasoning budget as a matcher: what it allows follows from the output alone, however it was reached."""

import random
from itertools import product

import numpy as np
import pytest

from tandem_engine.messages.sampling import ReasoningBudget
from tandem_engine.sampling.grammar.backend import masks_for_run
from tandem_engine.sampling.grammar.reasoning import BudgetedReasoning, ReasoningMatcher
from tandem_testing.plain_reasoning import allowed_after, answer_of
from tandem_testing.toy_grammar import EOS, VOCAB, WORDS, ToyGrammar, ToyRule, unpack

BEGIN, END = (90,), (91,)
ALL = {*range(VOCAB)}


def matcher(
    tokens: int, *, begin=BEGIN, end=END, opened: bool = True, rule: ToyRule | None = None, ended_by=()
) -> ReasoningMatcher:
    budget = ReasoningBudget(tokens=tokens, begin=begin, end=end, opened=opened, ended_by=ended_by)
    answer = None if rule is None else ToyGrammar(rule)
    return BudgetedReasoning.of(budget, answer, vocab_size=VOCAB, eos_token_ids={EOS}).matcher()


def allowed(following: ReasoningMatcher) -> set[int]:
    bits = np.zeros(WORDS, dtype=np.int32)
    following.fill(bits)
    return unpack(bits) & ALL


def test_end_is_forced_when_the_budget_is_spent():
    following = matcher(3)
    for token in (1, 2, 3):
        assert allowed(following) == ALL
        assert following.accept((token,)) == 1
    assert allowed(following) == {91}
    assert following.accept((5,)) == 0
    assert following.accept((91, 5, 90, 6, 7, 8, 9)) == 7
    assert allowed(following) == ALL
    assert (following.ended, following.problem) == (False, None)


def test_budget_of_nothing_ends_the_reasoning_at_once():
    assert allowed(matcher(0)) == {91}
    following = matcher(0, opened=False)
    assert allowed(following) == ALL
    following.accept(BEGIN)
    assert allowed(following) == {91}


def test_model_that_ends_its_reasoning_itself_is_left_alone():
    following = matcher(3)
    assert following.accept((1, 91, *range(1, 80))) == 81
    assert allowed(following) == ALL


def test_call_that_ends_the_reasoning_is_not_cut_by_the_budget():
    following = matcher(3, ended_by=(80,))
    assert following.accept((1, 80, 2, 3, 4, 5)) == 6
    assert allowed(following) == ALL
    following.rollback(5)
    assert following.accept((2, 3)) == 2
    assert allowed(following) == {91}
    assert following.accept((80,)) == 0


def test_end_of_reasoning_token_obeys_the_answers_grammar():
    rule = ToyRule(every=2, length=6)
    fits, other = (
        next(token for token in range(70, 90) if (token in rule.allowed(())) is right) for right in (True, False)
    )
    following = matcher(9, rule=rule, ended_by=(fits, other))
    assert allowed(following) == ALL - {EOS, other}
    assert following.accept((1, other)) == 1
    assert following.accept((fits,)) == 1
    plain = ToyGrammar(rule).matcher()
    plain.accept((fits,))
    assert allowed(following) == allowed(plain)


def test_partly_generated_end_of_reasoning_is_completed():
    following = matcher(3, end=(7, 7, 8))
    following.accept((1, 7, 7))
    assert allowed(following) == {8}
    following = matcher(3, end=(7, 7, 8))
    following.accept((7, 7, 7))
    assert allowed(following) == {8}
    following = matcher(3, end=(7, 7, 8))
    following.accept((1, 2, 3))
    assert [allowed(following) for _ in range(3) if following.accept(sorted(allowed(following)))] == [{7}, {8}, ALL]


@pytest.mark.parametrize(("blanks", "bounded"), [(0, True), (3, True), (4, False)])
def test_begin_marker_counts_where_outputs_begin(blanks, bounded):
    following = matcher(1, begin=(90, 92), opened=False)
    assert following.accept((*[5] * blanks, 90, 92, 6)) == blanks + 3
    assert allowed(following) == ({91} if bounded else ALL)


def test_grammar_begins_after_the_reasoning():
    rule = ToyRule(every=3, length=2)
    following = matcher(2, rule=rule)
    assert allowed(following) == ALL - {EOS}
    following.accept((1, 4))
    assert allowed(following) == {91}
    following.accept(END)
    assert allowed(following) == rule.allowed([])
    assert following.accept((3, 4)) == 1
    assert following.accept((6,)) == 1
    assert following.ended


def test_with_a_grammar_an_output_begins_to_reason_or_to_answer():
    rule = ToyRule(every=3)
    following = matcher(2, begin=(91, 92), end=(93,), opened=False, rule=rule)
    assert allowed(following) == rule.allowed([]) | {91}
    following.accept((91,))
    assert allowed(following) == {92}
    following.rollback(1)
    assert following.accept((3,)) == 1
    assert allowed(following) == rule.allowed([3])
    following.rollback(1)
    assert allowed(following) == rule.allowed([]) | {91}


def test_masks_of_a_run_follow_its_drafts_across_the_end():
    following = matcher(1)
    bits = np.zeros((5, WORDS), dtype=np.int32)
    assert masks_for_run(following, (5, 91, 6, 7), bits) == 5
    assert [unpack(row) & ALL for row in bits] == [ALL, {91}, ALL, ALL, ALL]
    assert masks_for_run(following, (5, 6, 7, 8), bits) == 2
    assert allowed(following) == ALL


CASES = [*product([0, 1, 4], [True, False], [None, ToyRule(every=2, length=6)], [(3,), (3, 4, 3)], [(5,), (3, 3, 5)])]


@pytest.mark.parametrize(("tokens", "opened", "rule", "begin", "end"), CASES)
def test_reasoning_budget_counts_accepted_output_only(tokens, opened, rule, begin, end):
    """Against the plain rule, over outputs of few distinct tokens, with guesses that are taken back."""
    rng = random.Random(tokens)
    for _ in range(12):
        following = matcher(tokens, begin=begin, end=end, opened=opened, rule=rule)
        budget = ReasoningBudget(tokens=tokens, begin=begin, end=end, opened=opened)
        outputs: list[int] = []
        while len(outputs) < 16 and not following.ended:
            plain = allowed_after(budget, outputs, rule and rule.allowed, vocab_size=VOCAB, eos=EOS)
            assert allowed(following) == plain, outputs
            guesses = [rng.choice((3, 4, 5, 6)) for _ in range(rng.randrange(5))]
            following.rollback(following.accept(guesses))
            token = rng.choice(sorted(plain & {3, 4, 5, 6}) or sorted(plain))
            assert following.accept((token,)) == 1
            outputs.append(token)
        answer = answer_of(budget, outputs, constrained=rule is not None)
        assert following.ended == (rule is not None and answer is not None and rule.ended(answer))
