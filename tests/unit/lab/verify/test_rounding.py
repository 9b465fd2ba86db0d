"""Differences in float32 count unless transformers itself is off by as much."""

from dataclasses import replace

import msgspec
import pytest

from tandem_engine.engine.stats import Generation
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.compare import MAX_ROUNDING, Comparison
from tandem_lab.verify.reference import ReferenceOutput, Scored
from tandem_lab.verify.rounding import Rounding

PROMPT, TOKENS = (1, 2), (5, 6)
REFERENCE = ReferenceOutput(prompt=PROMPT, token_ids=TOKENS, logprobs=(-1.0, -2.0), ignore_eos=True)
REQUEST = GenerateRequest(
    rid="r", input_ids=PROMPT, sampling=SamplingParams(max_tokens=2, temperature=0.0, logprobs=0, ignore_eos=True)
)
OTHER = "r (prompt of 2): output 1 is 9, reference 6"
FOUND = Comparison(difference="r: logprob -2.000300 at output 1, reference -2.000000", max_logprob_difference=3e-4)


def score(*logprobs: float):
    return lambda *_: Scored(logprobs=logprobs, behind=(0.0,) * len(logprobs))


def output(*logprobs: float, tokens=TOKENS, reason=FinishReason.LENGTH) -> Generation:
    return Generation(
        rid="r",
        resumed=0,
        token_ids=tokens,
        logprobs=tuple(TokenLogprob(logprob=value) for value in logprobs),
        finished=Finish(reason=reason),
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
    assert rounding.measured == MAX_ROUNDING


def edited(request: GenerateRequest, reference: ReferenceOutput):
    return request, replace(reference, edits=SamplingParams(max_tokens=2, repetition_penalty=1.2))


def masked(request: GenerateRequest, reference: ReferenceOutput):
    grammar = GrammarSpec(kind=GrammarKind.REGEX, source="a*")
    return msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar)
    ), reference


def free(request: GenerateRequest, reference: ReferenceOutput):
    return request, reference


@pytest.mark.parametrize(("rule", "difference"), [(free, None), (edited, OTHER), (masked, OTHER)])
def test_tokens_that_a_rule_chose_are_the_same(rule, difference):
    """A path that leaves out the rule gives likely tokens with the right logprobs."""
    request, reference = rule(REQUEST, REFERENCE)
    made = output(-1.0, -2.0, tokens=(5, 9))
    found = rounding_of(-1.0, -2.0004).compare([request], [made], [reference], otherwise=FOUND)
    assert found.difference == difference


def test_end_without_another_token_is_no_rounding():
    request = msgspec.structs.replace(
        REQUEST, sampling=msgspec.structs.replace(REQUEST.sampling, ignore_eos=False, max_tokens=3)
    )
    rounding = Rounding(score=score(-1.0, -2.0), exact=lambda: score(-1.0, -2.0004), references=[REFERENCE])
    longer = replace(REFERENCE, token_ids=(*TOKENS, 7), logprobs=(-1.0, -2.0, -3.0))
    made = output(-1.0, -2.0, reason=FinishReason.STOP)
    found = rounding.compare([request], [made], [longer], otherwise=FOUND)
    assert found.difference == "r (prompt of 2): output 2 is end (stop: ), reference 7"


def test_difference_is_logged_before_float64_is_loaded(caplog):
    compared(rounding_of(-1.0, -2.0), -1.0, -2.0003)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [FOUND.difference]


def test_float64_is_loaded_once():
    loads = []
    rounding = rounding_of(-1.0, -2.0)
    rounding.exact = lambda: loads.append(1) or score(-1.0, -2.0)
    assert [compared(rounding, -1.0, -2.0003) for _ in range(3)] == [FOUND.difference] * 3
    assert len(loads) == 1
