"""What rounding to bfloat16 may change, where no token can be asked to equal another's.

transformers computes in float32 with the numbers that the weights are in bfloat16, so what is measured is the rounding
of activations, ours alone. It is given the very tokens that a path came up with: one that takes another turn at a tie
is looked at to its end all the same. Every token must be

    as likely as the truth says, within a bound
    the likeliest there is, within twice that: each of the two may be off by the bound. Not where logits were edited or
        masked, for then another rule has chosen; that it was followed is seen in float32

The bound follows from what transformers itself loses: it computes the reference outputs in bfloat16, too, and twice its
largest error is the bound. A model that is more sensitive to rounding gets a wider bound, and an error of ours that is
larger than that of transformers does not pass because a fixed bound was generous.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem_engine.generation import Generation
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.verify.compare import Comparison, prompt_difference
from tandem_engine.verify.reference import ReferenceOutput, Scored

MARGIN = 2.0
"""Bound over the largest error of transformers: other outputs than the measured ones have other largest errors."""
MIN_BOUND = 0.02
"""In nats; for models so small that transformers' own error says little."""

Score = Callable[[Sequence[int], Sequence[int]], Scored]
"""(tokens before, tokens) → what the truth says of the latter."""


def logprob_bound(truth: Score, rounded: Score, references: Sequence[ReferenceOutput]) -> float:
    """How far logprobs may be from the truth, in nats, by what `rounded` makes of the reference outputs."""
    errors = [
        abs(mine - exact)
        for reference in references
        for mine, exact in zip(
            rounded(reference.prompt, reference.token_ids).logprobs,
            truth(reference.prompt, reference.token_ids).logprobs,
            strict=True,
        )
    ]
    return max(MIN_BOUND, MARGIN * max(errors))


@dataclass(slots=True)
class RememberedScores:
    """A `Score` that asks once for what most paths give alike."""

    score: Score
    _known: dict[tuple[tuple[int, ...], tuple[int, ...]], Scored] = field(default_factory=dict)

    def __call__(self, before: Sequence[int], tokens: Sequence[int]) -> Scored:
        key = (tuple(before), tuple(tokens))
        if key not in self._known:
            self._known[key] = self.score(before, tokens)
        return self._known[key]


def compare_scored(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[Generation],
    references: Sequence[ReferenceOutput],
    score: Score,
    bound: float,
) -> Comparison:
    """The first token out of bounds, and the largest difference of logprobs up to there."""
    worst = 0.0
    for request, output, reference in zip(requests, outputs, references, strict=True):
        wrong = _unfinished(request, output) or prompt_difference(request, output, reference, bound)
        if wrong is not None:
            return Comparison(difference=wrong, max_logprob_difference=worst)
        found = score((*request.input_ids, *request.resume_ids), output.token_ids)
        chosen_freely = reference.edits is None and not request.sampling.masked
        for place, (mine, truth, behind) in enumerate(
            zip(output.logprobs, found.logprobs, found.behind, strict=True), len(request.resume_ids)
        ):
            apart = abs(mine.logprob - truth)
            worst = max(worst, apart)
            if not apart <= bound:  # as of what is no number
                text = f"{request.rid}: logprob {mine.logprob:.4f} at output {place}, reference {truth:.4f}"
                return Comparison(difference=text, max_logprob_difference=worst)
            if chosen_freely and behind > 2 * bound:
                text = f"{request.rid}: output {place} is {behind:.4f} less likely than the likeliest token there"
                return Comparison(difference=text, max_logprob_difference=worst)
    return Comparison(difference=None, max_logprob_difference=worst)


def _unfinished(request: GenerateRequest, output: Generation) -> str | None:
    """What is missing of an output."""
    finish, tokens = output.finish, len(request.resume_ids) + len(output.token_ids)
    if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return f"{request.rid}: ended with {finish.reason.value} {finish.error or ''} after {tokens} tokens"
    if finish.reason is FinishReason.LENGTH and tokens != request.sampling.max_tokens:
        return f"{request.rid}: {tokens} tokens of {request.sampling.max_tokens}"
    if finish.reason is FinishReason.STOP and request.sampling.ignore_eos and not request.sampling.masked:
        return f"{request.rid}: stopped after {tokens} tokens, though nothing may stop it"
    if len(output.logprobs) != len(output.token_ids):
        return f"{request.rid}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens"
    return None
