"""bfloat16 on every kind of path: each token is as likely as transformers in float32 says, within a stated bound."""

from dataclasses import replace
from math import nan

import msgspec
import pytest
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.__main__ import main
from tandem_lab.verify.compare import MIN_BOUND, Comparison, RememberedScores, compare_scored, logprob_bound
from tandem_lab.verify.paths import make_paths
from tandem_lab.verify.reference import ReferenceOutput, Scored, TransformersReference
from tandem_lab.verify.verification import Verification
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    DISAGGREGATED,
    MIXED,
    RETRACTED,
    SHARED,
    SWAPPED,
    TWICE,
    run_paths_of,
)
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PATHS = [
    CHUNKED,
    CACHED,
    MIXED,
    TWICE,
    RETRACTED,
    "resumed",
    "edited: mixed, staggered",
    DISAGGREGATED,
    SWAPPED,
    SHARED,
]


def rounded(checkpoint):
    return load(EngineConfig(model_path=str(checkpoint), dtype="bfloat16"), progress=False)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_every_path_is_within_the_bound(family, tmp_path):
    results = run_paths_of(rounded(write_tiny_checkpoint(family, tmp_path)), PATHS)
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in PATHS]
    assert max(result.max_logprob_difference for result in results) > 0


def test_another_model_is_out_of_bounds(tmp_path):
    """The bound lets no damage pass: outputs of one model do not do for another's."""
    model = rounded(write_tiny_checkpoint("qwen3", tmp_path / "one"))
    other = TransformersReference(str(write_tiny_checkpoint("qwen3", tmp_path / "other", seed=1)))
    reference = other.generate((1, 2, 3), 8, frozenset(), ignore_eos=True)
    verification = Verification(model=model, references=[reference], max_tokens=8, score=RememberedScores(other.score))
    with torch.inference_mode():
        path = make_paths(context_length=32, longest=11, num_prompts=1, quick=True)[0]
        assert "reference" in (verification.run(path).difference or "")


PLAIN = ReferenceOutput(prompt=(1, 2), token_ids=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), ignore_eos=True)
REQUEST = GenerateRequest(rid="r", input_ids=(1, 2), sampling=SamplingParams(max_tokens=3, ignore_eos=True))
MASKED = msgspec.structs.replace(
    REQUEST,
    sampling=msgspec.structs.replace(REQUEST.sampling, grammar=GrammarSpec(kind=GrammarKind.REGEX, source="a*")),
)
BOUND = 0.2
LIKELIEST, UNLIKELY = (0.0, 0.0, 0.0), (0.0, 3 * BOUND, 0.0)


def output(tokens=(5, 9, 7), logprobs=(-1.0, -2.0, -3.0), reason=FinishReason.LENGTH) -> Generation:
    return Generation(
        rid="r",
        resumed=0,
        token_ids=tokens,
        logprobs=tuple(TokenLogprob(logprob=value) for value in logprobs),
        finished=Finish(reason=reason),
    )


@pytest.mark.parametrize(
    ("made", "behind", "request_", "difference"),
    [
        (output(), LIKELIEST, REQUEST, None),
        (output(logprobs=(-1.0, -2.1, -3.0)), LIKELIEST, REQUEST, None),
        (output(logprobs=(-1.0, -2.25, -3.0)), LIKELIEST, REQUEST, "logprob -2.2500 at output 1, reference -2.0000"),
        (output(), UNLIKELY, REQUEST, "output 1 is 0.6000 less likely than the likeliest token there"),
        (output(), UNLIKELY, MASKED, None),
        (output((5, 9), (-1.0, -2.0)), LIKELIEST, REQUEST, "2 tokens of 3"),
        (output((5, 9), (-1.0, -2.0), FinishReason.STOP), LIKELIEST, REQUEST, "stopped after 2 tokens"),
        (output((5, 9), (-1.0, -2.0), FinishReason.STOP), LIKELIEST, MASKED, None),
        (output(logprobs=(-1.0, -2.0)), LIKELIEST, REQUEST, "2 logprobs for 3 tokens"),
        (output((5,), (-1.0,), FinishReason.ERROR), LIKELIEST, REQUEST, "ended with error"),
    ],
)
def test_first_token_out_of_bounds_is_found_and_named(made, behind, request_, difference):
    """Tokens need not be the reference's, which has 6 where this output has 9."""

    def score(before, tokens):
        assert before == (1, 2)
        return Scored(logprobs=(-1.0, -2.0, -3.0)[: len(tokens)], behind=behind[: len(tokens)])

    found = compare_scored([request_], [made], [PLAIN], score, BOUND).difference
    assert (found is None) if difference is None else (difference in found)


def test_logprob_that_is_no_number_is_out_of_bounds():
    """A comparison with it is never true, and so it was within any bound."""
    broken = output(logprobs=(-1.0, nan, -3.0))
    scored = Scored(logprobs=(-1.0, -2.0, -3.0), behind=LIKELIEST)
    found = compare_scored([REQUEST], [broken], [PLAIN], lambda *_: scored, BOUND)
    assert found == Comparison(difference="r: logprob nan at output 1, reference -2.0000", max_logprob_difference=0.0)


@pytest.mark.parametrize(("error", "bound"), [(0.0, MIN_BOUND), (0.004, MIN_BOUND), (0.3, 0.6)])
def test_bound_is_twice_the_error_of_transformers(error, bound):
    """Of the largest error of all tokens, in either direction."""

    def truth(before, tokens):
        return Scored(logprobs=(-1.0, -2.0, -3.0), behind=LIKELIEST)

    def rounded_scores(before, tokens):
        return Scored(logprobs=(-1.0, -2.0 - error, -3.0 + error / 2), behind=LIKELIEST)

    assert logprob_bound(truth, rounded_scores, [PLAIN, PLAIN]) == pytest.approx(bound)


def test_edited_logits_choose_by_another_rule():
    edited = replace(PLAIN, edits=SamplingParams(max_tokens=3))

    def score(before, tokens):
        return Scored(logprobs=(-1.0, -2.0, -3.0), behind=UNLIKELY)

    assert compare_scored([REQUEST], [output()], [edited], score, BOUND).difference is None


def test_equal_scores_are_computed_once():
    asked = []

    def score(before, tokens):
        asked.append((before, tokens))
        return Scored(logprobs=(), behind=())

    remembered = RememberedScores(score)
    for tokens in ((5,), (6,), (5,)):
        remembered((1, 2), tokens)
    assert asked == [((1, 2), (5,)), ((1, 2), (6,))]


def test_fewer_bits_of_kv_are_verified_in_float32(tmp_path, capsys):
    checkpoint = str(write_tiny_checkpoint("qwen3", tmp_path))
    assert main(["verify", "--model", checkpoint, "--dtype", "bfloat16", "--kv-cache-dtype", "fp8"]) == 2
    assert "leave out --dtype bfloat16" in capsys.readouterr().err
