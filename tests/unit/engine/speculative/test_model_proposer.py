"""Draft KV is always that of the text: the fake model's guesses are right if and only if it is."""

import types
from dataclasses import replace

import pytest
import torch

from tandem_engine.forward.batch import Guesses
from tandem_testing.draft_builders import DraftBench, FakeDrafts, make_fake_drafts
from tandem_testing.fake_executor import next_token

VOCAB = 97
PROMPT = list(range(1, 12))


def right(text: list[int], count: int, seed: int | None = None) -> tuple[int, ...]:
    """What the model itself would say."""
    history = list(text)
    for _ in range(count):
        noise = None if seed is None else (seed, len(history))
        history.append(next_token(history, vocab_size=VOCAB, noise=noise))
    return tuple(history[len(text) :])


def drafts_for(bench: DraftBench, **options: int) -> FakeDrafts:
    return make_fake_drafts(
        num_pages=bench.memory.allocator.num_pages, page_size=bench.page_size, vocab_size=VOCAB, **options
    )


def test_guesses_continue_the_text():
    bench = DraftBench()
    drafts = drafts_for(bench)
    request = bench.request(PROMPT, limit=4)
    assert drafts.proposer.propose([request]).chains == (right(PROMPT, 4),)
    assert drafts.computed == [len(PROMPT)]


def test_draft_kv_is_reused_for_accepted_tokens_only():
    bench = DraftBench()
    drafts = drafts_for(bench)
    request = bench.request(PROMPT, limit=4)
    first = drafts.proposer.propose([request]).chains[0]
    text = [*PROMPT, *first[:2], 60]
    request = bench.request(text, limit=3, kv=request.kv)
    assert drafts.proposer.propose([request]).chains == (right(text, 3),)
    assert drafts.computed == [len(PROMPT), 1]


def test_fully_accepted_run_leaves_two_tokens_to_draft_kv():
    bench = DraftBench()
    drafts = drafts_for(bench)
    request = bench.request(PROMPT, limit=3)
    drafts.proposer.propose([request])
    text = [*PROMPT, *right(PROMPT, 4)]
    request = bench.request(text, limit=3, kv=request.kv)
    assert drafts.proposer.propose([request]).chains == (right(text, 3),)
    assert drafts.computed[1] == 2


def test_guesses_have_the_noise_of_their_positions():
    bench = DraftBench()
    drafts = drafts_for(bench)
    sampled = bench.request(PROMPT, temperature=1.0, seed=5)
    greedy = bench.request(PROMPT[:6], limit=2)
    assert drafts.proposer.propose([sampled, greedy]).chains == (right(PROMPT, 4, seed=5), right(PROMPT[:6], 2))


def test_text_that_was_not_offered_for_a_while_is_caught_up_with():
    bench = DraftBench()
    drafts = drafts_for(bench)
    request = bench.request(PROMPT)
    drafts.proposer.propose([request])
    text = [*PROMPT, *range(40, 60)]
    assert drafts.proposer.propose([bench.request(text, kv=request.kv)]).chains == (right(text, 4),)


def test_long_text_draft_kv_is_computed_over_several_proposals():
    bench = DraftBench()
    drafts = drafts_for(bench, max_text=5)
    first, second = bench.request(PROMPT), bench.request([60, 61, 62, 63])
    chains = [drafts.proposer.propose([first, second]).chains for _ in range(4)]
    assert chains == [((), ()), ((), ()), (right(PROMPT, 4), right([60, 61, 62, 63], 4)), chains[3]]
    assert drafts.computed[:3] == [5, 5, 5]


def test_draft_kv_of_cached_prefix_serves_next_request():
    bench = DraftBench()
    drafts = drafts_for(bench)
    first = bench.request(PROMPT)
    drafts.proposer.propose([first])
    drafts.proposer.release(first.kv, PROMPT[:-1])
    bench.finish(first)
    text = [*PROMPT[:8], 70, 71, 72]
    second = bench.request(text)
    assert second.kv.computed_from == 8
    assert drafts.proposer.propose([second]).chains == (right(text, 4),)
    assert drafts.computed == [len(PROMPT), 3]


def test_cached_prefix_without_draft_kv_is_computed_by_draft():
    bench = DraftBench()
    drafts = drafts_for(bench)
    first = bench.request(PROMPT)
    bench.finish(first)
    second = bench.request(PROMPT)
    assert second.kv.computed_from == 8
    assert drafts.proposer.propose([second]).chains == (right(PROMPT, 4),)
    assert drafts.computed == [len(PROMPT)]


def test_pages_that_came_to_hold_another_text_are_noticed():  # [row-state-forgotten]
    bench = DraftBench()
    drafts = drafts_for(bench)
    first = bench.request(PROMPT)
    drafts.proposer.propose([first])
    drafts.proposer.release(first.kv, PROMPT[:-1])
    bench.memory.release(first.kv, (), checkpoint=False, after_step=None)
    other = list(range(50, 61))
    second = bench.request(other)
    assert set(second.kv.pages) & set(first.kv.pages) or second.kv.row == first.kv.row
    assert drafts.proposer.propose([second]).chains == (right(other, 4),)


def test_no_guess_beyond_the_positions_of_the_network():
    bench = DraftBench()
    drafts = drafts_for(bench)
    drafts.proposer.positions = len(PROMPT) + 1
    assert drafts.proposer.propose([bench.request(PROMPT)]).chains == (right(PROMPT, 2),)
    longer = bench.request([*PROMPT, 1])
    assert not drafts.proposer.ready(longer)
    assert drafts.proposer.propose([longer]).chains == ((),)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("extra", [-1, 1])
def test_network_makes_requested_number_of_drafts(on_device, extra):
    """Else each chain would have drafts of another; checking that would wait for a device."""
    bench = DraftBench()
    drafts = drafts_for(bench)
    network = drafts.proposer.network

    def miscounting(batches) -> Guesses:
        tokens = (network(batches).tokens() * 2)[: 4 + extra]
        if on_device:
            return Guesses(lambda: pytest.fail("waited"), on_device=torch.tensor(tokens))
        return Guesses(lambda: [types.SimpleNamespace(next_token_ids=tokens)])

    proposer = replace(drafts.proposer, network=miscounting)
    with pytest.raises(AssertionError, match=f"made {4 + extra} drafts where 4 were requested"):
        proposer.propose([bench.request(PROMPT, limit=4)])
