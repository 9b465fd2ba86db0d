"""Edits step by step on the device against edits of one row at a time from its whole history."""

import math
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.logits_processor import LogitEditor
from tandem_engine.scheduler.request import Request
from tandem_testing.edit_builders import make_edits, make_request, settled
from tandem_testing.plain_sampling import edited_logits

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.3]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    logit_bias=st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=3).map(lambda d: tuple(d.items())),
    allowed_token_ids=st.sampled_from([(), (), (1, 4, 5, 9)]),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
)


def noise(rows: int, step: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(step)) * 2


def plain(req: Request, logits: torch.Tensor, outputs: Sequence[int], suppress: Sequence[int] = ()) -> torch.Tensor:
    edited = edited_logits(
        logits.tolist(), req.sampling, prompt=req.origin_input_ids, outputs=outputs, suppress=suppress
    )
    return torch.tensor(edited)


@settings(deadline=None, max_examples=150)
@given(
    wants=st.lists(
        st.tuples(params, st.lists(tokens, max_size=5), st.lists(tokens, max_size=40)), min_size=1, max_size=4
    ),
    steps=st.lists(st.lists(tokens, min_size=4, max_size=4), min_size=1, max_size=8),
    suppressed=st.lists(tokens, max_size=2),
)
def test_each_row_is_edited_by_its_whole_history(wants, steps, suppressed):  # [device-history] [history-rebuilt]
    requests = [make_request(i + 1, p, prompt=prompt, outputs=out) for i, (p, prompt, out) in enumerate(wants)]
    histories = [list(req.output_ids) for req in requests]
    suppress = tuple(tuple(suppressed) if i == 0 else () for i in range(len(requests)))
    editor, edits = LogitEditor(), make_edits(requests)
    for number, drawn in enumerate(steps):
        logits = noise(len(requests), number)
        edited = editor.edit(logits, edits, suppress)
        for i, req in enumerate(requests):
            torch.testing.assert_close(edited[i], plain(req, logits[i], histories[i], suppress[i]))
        chosen = drawn[: len(requests)]
        editor.record(edits, torch.tensor(chosen)[:, None])
        edits = settled(edits)
        for history, token in zip(histories, chosen, strict=True):
            history.append(token)


@settings(deadline=None, max_examples=100)
@given(
    wants=st.lists(st.tuples(params, st.lists(tokens, max_size=6)), min_size=1, max_size=3),
    drafts=st.lists(st.lists(tokens, max_size=3), min_size=3, max_size=3),
    accepted=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_run_of_positions_is_edited_as_one_token_after_the_other(wants, drafts, accepted):  # [every-accepted-token]
    requests = [make_request(i + 1, p, outputs=out) for i, (p, out) in enumerate(wants)]
    drafts, longest = drafts[: len(requests)], 3
    lens = torch.tensor([len(run) + 1 for run in drafts])
    ahead = torch.tensor([[*run[:at], *[-1] * (longest - at)] for run in drafts for at in range(len(run) + 1)])
    editor, edits = LogitEditor(), make_edits(requests)
    logits = noise(len(ahead), 1)
    edited = editor.edit(logits, edits.over_runs(lens), ahead=ahead)
    rows = iter(range(len(ahead)))
    for req, run in zip(requests, drafts, strict=True):
        for at in range(len(run) + 1):
            row = next(rows)
            torch.testing.assert_close(edited[row], plain(req, logits[row], [*req.output_ids, *run[:at]]))
    kept = [run[:count] for run, count in zip(drafts, accepted, strict=False)]
    editor.record(edits, torch.tensor([[*run, *[-1] * (longest - len(run))] for run in kept]))
    following = noise(len(requests), 2)
    edited = editor.edit(following, settled(edits))
    for i, (req, run) in enumerate(zip(requests, kept, strict=True)):
        torch.testing.assert_close(edited[i], plain(req, following[i], [*req.output_ids, *run]))


def edit_one(sampling: SamplingParams, outputs: Sequence[int] = (), suppress: Sequence[int] = ()) -> torch.Tensor:
    edits = make_edits([make_request(1, sampling, outputs=outputs)])
    return LogitEditor().edit(torch.zeros(1, VOCAB), edits, (tuple(suppress),))[0]


def forbidden(edited: torch.Tensor) -> set[int]:
    return {*(edited == -math.inf).nonzero().flatten().tolist()}


def test_logit_editor_without_edits_returns_same_tensor():
    logits = torch.zeros(2, VOCAB)
    assert LogitEditor().edit(logits, None) is logits
    assert LogitEditor().edit(logits, None, ((), ())) is logits


def test_editing_does_not_change_the_given_logits():
    logits = noise(1, 3)
    before = logits.clone()
    sampling = SamplingParams(max_tokens=1, presence_penalty=1.0, logit_bias=((2, 3.0),), bad_words=((1,), (4, 5)))
    LogitEditor().edit(logits, make_edits([make_request(1, sampling, outputs=(4, 4))]), ((7,),))
    assert torch.equal(logits, before)


def test_bias_lifts_nothing_that_is_forbidden():
    sampling = SamplingParams(max_tokens=1, logit_bias=((3, 100.0), (4, 100.0)), bad_words=((3,),))
    edited = edit_one(sampling, suppress=(4,))
    assert forbidden(edited) == {3, 4}


def test_bias_counts_among_allowed_tokens():
    edited = edit_one(SamplingParams(max_tokens=1, allowed_token_ids=(3, 5), logit_bias=((5, 2.0),)))
    assert forbidden(edited) == {*range(VOCAB)} - {3, 5}
    assert edited[[3, 5]].tolist() == [0.0, 2.0]


def test_bad_word_forbids_last_token_after_its_prefix():
    words = SamplingParams(max_tokens=9, bad_words=((1, 2, 3), (2, 4), (9,)))
    assert forbidden(edit_one(words)) == {9}
    assert forbidden(edit_one(words, outputs=(2,))) == {9, 4}
    assert forbidden(edit_one(words, outputs=(1, 2))) == {9, 4, 3}
    assert forbidden(edit_one(words, outputs=(2, 1))) == {9}


def test_bad_word_that_begins_in_the_prompt_is_not_forbidden():
    sampling = SamplingParams(max_tokens=9, bad_words=((1, 2),))
    edits = make_edits([make_request(1, sampling, prompt=(5, 1))])
    assert forbidden(LogitEditor().edit(torch.zeros(1, VOCAB), edits)[0]) == set()


def test_allowed_tokens_stay_possible_despite_other_rules():  # [logit-bias]
    words = SamplingParams(max_tokens=9, allowed_token_ids=(3, 5), bad_words=((3,), (1, 5)))
    assert forbidden(edit_one(words, outputs=(1,))) == {*range(VOCAB)} - {3, 5}
    assert forbidden(edit_one(words, outputs=(2,))) == {*range(VOCAB)} - {5}


def test_company_does_not_change_a_row():
    wants = [
        SamplingParams(max_tokens=9, repetition_penalty=1.7, frequency_penalty=0.3),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, presence_penalty=0.9, bad_words=((4, 5), (7,)), logit_bias=((1, -2.5),)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 4, 6)),
    ]
    logits = noise(len(wants), 9)
    requests = [make_request(i + 1, p, outputs=(4, 4, i)) for i, p in enumerate(wants)]
    together = LogitEditor().edit(logits, make_edits(requests))
    for i, sampling in enumerate(wants):
        alone = make_edits([make_request(5, sampling, outputs=(4, 4, i))])
        assert torch.equal(LogitEditor().edit(logits[i : i + 1], alone)[0], together[i]), i
    assert torch.equal(together[1], logits[1])
