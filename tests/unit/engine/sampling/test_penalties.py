"""Counts on the device, and what they do to logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.forward.logit_edits import Penalties
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.logits_processor import PenaltyRows
from tandem_testing.plain_sampling import edited_logits

VOCAB = 40
PROMPT, OUTPUTS = (3, 3, 7, 12), (5, 7, 5, 30)
STRONG = SamplingParams(max_tokens=9, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


def penalties(*slots: int, params: SamplingParams = STRONG) -> Penalties:
    count = len(slots)
    return Penalties(
        index=torch.arange(count),
        slots=torch.tensor(slots),
        repetition=torch.tensor([params.repetition_penalty] * count),
        frequency=torch.tensor([params.frequency_penalty] * count),
        presence=torch.tensor([params.presence_penalty] * count),
    )


def loaded(*histories: tuple[tuple[int, ...], tuple[int, ...]]) -> PenaltyRows:
    rows = PenaltyRows()
    for slot, (prompt, outputs) in enumerate(histories):
        rows.load(slot, prompt, outputs, vocab_size=VOCAB)
    return rows


def applied(rows: PenaltyRows, slot: int = 0, params: SamplingParams = STRONG, raw: torch.Tensor | None = None):
    penalized = (logits() if raw is None else raw).clone()
    rows.apply(penalized, penalties(slot, params=params))
    return penalized[0]


def expected(outputs: tuple[int, ...], prompt: tuple[int, ...] = PROMPT, params: SamplingParams = STRONG):
    return torch.tensor(edited_logits(logits()[0].tolist(), params, prompt=prompt, outputs=outputs))


@pytest.mark.parametrize(
    "params",
    [
        STRONG,
        SamplingParams(max_tokens=1, repetition_penalty=0.7),
        SamplingParams(max_tokens=1, frequency_penalty=-1.0),
        SamplingParams(max_tokens=1, presence_penalty=2.0),
    ],
)
def test_each_penalty_follows_its_formula(params):
    torch.testing.assert_close(applied(loaded((PROMPT, OUTPUTS)), params=params), expected(OUTPUTS, params=params))


def test_repetition_penalty_counts_prompt_others_only_output():
    changed = (applied(loaded((PROMPT, OUTPUTS))) != logits()[0]).nonzero().flatten().tolist()
    assert changed == sorted({*PROMPT, *OUTPUTS})
    output_only = SamplingParams(max_tokens=1, presence_penalty=1.0, frequency_penalty=1.0)
    changed = (applied(loaded((PROMPT, OUTPUTS)), params=output_only) != logits()[0]).nonzero().flatten().tolist()
    assert changed == sorted({*OUTPUTS})


def test_recorded_tokens_count_like_loaded_ones():  # [device-history]
    rows = loaded((PROMPT, ()))
    for token in OUTPUTS:
        rows.record(torch.tensor([0]), torch.tensor([[token]]))
    torch.testing.assert_close(applied(rows), expected(OUTPUTS))


def test_every_token_of_a_run_counts_and_rejected_ones_do_not():  # [every-accepted-token]
    rows = loaded((PROMPT, ()), (PROMPT, ()))
    rows.record(torch.tensor([0, 1]), torch.tensor([[5, 7, 5, 30], [9, -1, -1, -1]]))
    torch.testing.assert_close(applied(rows, 0), expected(OUTPUTS))
    torch.testing.assert_close(applied(rows, 1), expected((9,)))


def test_each_position_of_a_run_sees_the_drafts_before_it():  # [every-accepted-token]
    drafts = (5, 5, 12)
    rows = loaded((PROMPT, OUTPUTS))
    raw = logits(len(drafts) + 1)
    ahead = torch.tensor([[*drafts[:at], *[-1] * (len(drafts) - at)] for at in range(len(drafts) + 1)])
    together = raw.clone()
    rows.apply(together, penalties(0, 0, 0, 0), ahead)
    for at in range(len(drafts) + 1):
        alone = applied(rows, raw=raw[at : at + 1])
        assert torch.equal(together[at], alone), at
        if at < len(drafts):
            rows.record(torch.tensor([0]), torch.tensor([[drafts[at]]]))


def test_drafts_ahead_are_not_remembered():
    rows = loaded((PROMPT, OUTPUTS))
    before = applied(rows)
    rows.apply(logits().clone(), penalties(0), torch.tensor([[5, 9]]))
    assert torch.equal(applied(rows), before)


def test_reused_penalty_slot_has_no_counts_of_its_former_request():
    rows = loaded((PROMPT, OUTPUTS))
    rows.load(0, (1,), (2,), vocab_size=VOCAB)
    torch.testing.assert_close(applied(rows), expected((2,), prompt=(1,)))


def test_penalty_tables_grow_with_slots_and_keep_counts():
    rows = loaded((PROMPT, OUTPUTS))
    assert rows.capacity == 1
    before = applied(rows)
    rows.load(4, (), (1, 1), vocab_size=VOCAB)
    assert rows.capacity == 5
    assert torch.equal(applied(rows), before)
    torch.testing.assert_close(applied(rows, 4), expected((1, 1), prompt=()))


def test_only_the_named_rows_are_touched():
    rows, raw = loaded((PROMPT, OUTPUTS)), logits(3)
    penalized = raw.clone()
    only_middle = Penalties(
        index=torch.tensor([1]),
        slots=torch.tensor([0]),
        repetition=torch.tensor([2.0]),
        frequency=torch.tensor([1.0]),
        presence=torch.tensor([0.0]),
    )
    rows.apply(penalized, only_middle)
    assert torch.equal(penalized[[0, 2]], raw[[0, 2]])
    assert not torch.equal(penalized[1], raw[1])


@pytest.mark.parametrize("block", [1, VOCAB, 3 * VOCAB])
def test_penalized_rows_are_equal_for_any_block_size(monkeypatch, block):
    rows, raw = loaded((PROMPT, OUTPUTS), ((1,), (2, 2)), ((), (9,))), logits(3)
    together = raw.clone()
    rows.apply(together, penalties(0, 1, 2))
    monkeypatch.setattr("tandem_engine.sampling.logits_processor.BLOCK", block)
    apart = raw.clone()
    rows.apply(apart, penalties(0, 1, 2), torch.full((3, 1), -1))
    assert torch.equal(apart, together)


@settings(deadline=None, max_examples=60)
@given(
    histories=st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), max_size=9), st.lists(st.integers(0, VOCAB - 1), max_size=9)),
        min_size=1,
        max_size=5,
    ),
    runs=st.lists(st.lists(st.lists(st.integers(-1, VOCAB - 1), min_size=3, max_size=3), min_size=5, max_size=5)),
)
def test_sparse_penalties_equal_dense_penalties_bitwise(histories, runs):
    rows, count = loaded(*histories), len(histories)
    counts, in_prompt = torch.zeros(count, VOCAB, dtype=torch.int32), torch.zeros(count, VOCAB, dtype=torch.bool)
    for slot, (prompt, outputs) in enumerate(histories):
        in_prompt[slot, list(prompt)] = True
        for token in outputs:
            counts[slot, token] += 1
    for run in runs:
        rows.record(torch.arange(count), torch.tensor(run[:count]))
        for slot, tokens in enumerate(run[:count]):
            for token in tokens:
                counts[slot, token] += token >= 0
    known, raw = (counts > 0) | in_prompt, logits(count)
    whole = torch.where(known, torch.where(raw > 0, raw / 1.5, raw * 1.5), raw) - 0.5 * counts - 0.25 * (counts > 0)
    listed = raw.clone()
    rows.apply(listed, penalties(*range(count)))
    assert torch.equal(listed, whole)


def test_tokens_are_listed_once_and_lists_grow(monkeypatch):
    monkeypatch.setattr("tandem_engine.sampling.logits_processor.FIRST_WIDTH", 2)
    rows = loaded((PROMPT, ()))
    for token in [*range(VOCAB), *range(VOCAB)]:
        rows.record(torch.tensor([0]), torch.tensor([[token, 7]]))
    seen = rows._seen[0, : int(rows._lens[0])].tolist()
    assert sorted(seen) == [*range(VOCAB)]
    torch.testing.assert_close(applied(rows), expected((*range(VOCAB), *range(VOCAB), *([7] * 2 * VOCAB))))
