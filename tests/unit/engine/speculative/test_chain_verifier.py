import pytest
import torch

from tandem_engine.forward.batch import ForwardBatch, ForwardResult, SampledLogprobs, sampled_tokens
from tandem_engine.speculative.interface import DraftTokens
from tandem_engine.speculative.verify import ChainVerifier, VerifiedForward
from tandem_testing.forward_builders import Seq, make_batch, make_sampling


@pytest.mark.parametrize(
    ("chains", "sampled", "accepted"),
    [
        (((),), [5], (1,)),
        (((5, 6),), [5, 6, 7], (3,)),
        (((5, 6),), [5, 9, 7], (2,)),
        (((5, 6),), [4, 6, 7], (1,)),
        (((5,), (), (1, 2, 3)), [5, 8, 9, 1, 2, 9, 4], (2, 1, 3)),
        ((), [], ()),
    ],
)
def test_drafts_are_accepted_up_to_first_mismatch(chains, sampled, accepted):
    assert ChainVerifier().verify(DraftTokens(chains), sampled).accept_lens == accepted


def test_result_that_does_not_fit_the_drafts_is_a_bug():
    with pytest.raises(AssertionError, match="4 tokens sampled for runs of 3"):
        ChainVerifier().verify(DraftTokens(((1, 2),)), [1, 2, 3, 4])


class FixedModel:
    """Returns the same drafts for any query, and records its inputs."""

    def __init__(self, result: ForwardResult) -> None:
        self.result = result
        self.recorded: list[list[list[int]]] = []
        self.accepted: list[tuple[int, ...]] = []

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        return self.result

    def record(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        self.recorded.append(token_ids.tolist())

    def accept(self, accept_lens: tuple[int, ...]) -> None:
        self.accepted.append(accept_lens)


def drafted_batch(*sequences: Seq, draft_lens: tuple[int, ...]) -> ForwardBatch:
    batch = make_batch(list(sequences), sampling=make_sampling(temperature=[0.0]))
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    return ForwardBatch(**{**fields, "draft_lens": draft_lens})


def test_rows_that_mean_nothing_spoil_their_sequences():
    batch = drafted_batch(
        Seq(seq_len=9, extend_len=3, pages=[1], input_ids=[40, 41, 42]),
        Seq(seq_len=4, extend_len=4, pages=[2], input_ids=[1, 2, 3, 4]),
        Seq(seq_len=6, extend_len=2, pages=[3], input_ids=[50, 51]),
        draft_lens=(2, 0, 1),
    )
    model = FixedModel(ForwardResult(step=0, next_token_ids=(41, 0, 61, 7, 0, 0), corrupted=(1, 4, 5)))
    assert VerifiedForward(model=model, verifier=ChainVerifier()).forward(batch).corrupted == (0, 2)


def test_ids_and_logprobs_are_cut_at_same_place():  # [one-cut]
    batch = drafted_batch(
        Seq(seq_len=9, extend_len=3, pages=[1], input_ids=[40, 41, 42]),
        Seq(seq_len=4, extend_len=4, pages=[2], input_ids=[1, 2, 3, 4]),
        Seq(seq_len=6, extend_len=2, pages=[3], input_ids=[50, 51]),
        draft_lens=(2, 0, 1),
    )
    sampled = (41, 60, 61, 7, 51, 52)
    logprobs = tuple(SampledLogprobs(logprob=-float(token), top=()) for token in sampled)
    model = FixedModel(ForwardResult(step=0, next_token_ids=sampled, logprobs=logprobs))
    forward = VerifiedForward(model=model, verifier=ChainVerifier())
    result = forward.forward(batch)
    assert result.accept_lens == (2, 1, 2)
    assert result.next_token_ids == (41, 60, 7, 51, 52)
    assert [entry.logprob for entry in result.logprobs] == [-41.0, -60.0, -7.0, -51.0, -52.0]


def test_step_without_drafts_is_left_alone():
    plain = ForwardResult(step=3, next_token_ids=(1,))
    forward = VerifiedForward(model=FixedModel(plain), verifier=ChainVerifier())
    assert forward.forward(make_batch([Seq(seq_len=2, extend_len=2, pages=[1])])) is plain


def test_verifier_samples_after_each_token_of_a_run():
    batch = drafted_batch(
        Seq(seq_len=9, extend_len=5, pages=[1], samples=False),
        Seq(seq_len=9, extend_len=3, pages=[2]),
        Seq(seq_len=4, extend_len=4, pages=[3]),
        draft_lens=(2, 0),
    )
    assert torch.equal(sampled_tokens(batch), torch.tensor([5, 6, 7, 11]))
