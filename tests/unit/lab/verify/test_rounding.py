"""Differences in float32 count unless transformers itself is off by as much."""

import pytest

from tandem_engine.engine.stats import Generation
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.compare import MOST_ROUNDING, Comparison
from tandem_lab.verify.reference import ReferenceOutput, Scored
from tandem_lab.verify.rounding import Rounding

PROMPT, TOKENS = (1, 2), (5, 6)
REFERENCE = ReferenceOutput(prompt=PROMPT, token_ids=TOKENS, logprobs=(-1.0, -2.0), ignore_eos=True)
REQUEST = GenerateRequest(
    rid="r", input_ids=PROMPT, sampling=SamplingParams(max_tokens=2, temperature=0.0, logprobs=0, ignore_eos=True)
)
FOUND = Comparison(difference="r: logprob -2.000300 at output 1, reference -2.000000", max_logprob_difference=3e-4)


def score(*logprobs: float):
    return lambda *_: Scored(logprobs=logprobs, behind=(0.0,) * len(logprobs))


def output(*logprobs: float) -> Generation:
    return Generation(
        rid="r",
        resumed=0,
        token_ids=TOKENS,
        logprobs=tuple(TokenLogprob(logprob=value) for value in logprobs),
        finished=Finish(reason=FinishReason.LENGTH),
    )


def compared(rounding: Rounding, *logprobs: float) -> str | None:
    return rounding.compare([REQUEST], [output(*logprobs)], [REFERENCE], otherwise=FOUND).difference


def rounding_of(*exact: float) -> Rounding:
    """Of a model whose float32 gives -1 and -2."""
    return Rounding(score=score(-1.0, -2.0), exact=lambda: score(*exact), references=[REFERENCE])


def test_difference_of_insensitive_model_stands():
    rounding = rounding_of(-1.0, -2.00002)
    assert compared(rounding, -1.0, -2.0003) == FOUND.difference


def test_difference_within_error_of_transformers_is_rounding():
    rounding = rounding_of(-1.0, -2.0004)
    assert compared(rounding, -1.0, -2.0003) is None
    assert rounding.measured == pytest.approx(8e-4)


def test_difference_beyond_error_of_transformers_is_found():
    assert compared(rounding_of(-1.0, -2.0004), -1.0, -2.002) == "r: logprob -2.0020 at output 1, reference -2.0000"


def test_bound_of_hopeless_model_is_limited():
    rounding = rounding_of(-1.0, -3.0)
    assert compared(rounding, -1.0, -2.1) == "r: logprob -2.1000 at output 1, reference -2.0000"
    assert rounding.measured == MOST_ROUNDING


def test_float64_is_loaded_once():
    loads = []
    rounding = rounding_of(-1.0, -2.0)
    rounding.exact = lambda: loads.append(1) or score(-1.0, -2.0)
    assert [compared(rounding, -1.0, -2.0003) for _ in range(3)] == [FOUND.difference] * 3
    assert len(loads) == 1
