"""Drives an engine along one path and compares each output with the reference, token by token.

With bfloat16, tokens need not be equal to the reference's. transformers computes in float32 with the numbers that the
weights have in bfloat16, so what is measured is the rounding of Tandem's activations alone. It scores the very tokens
of a path, so that one which differs at a tie is still compared to its end. Every token must be

    as likely as in the reference, within a bound
    the likeliest, within twice that, since each of the two may be off by the bound. This does not hold where logits
        were edited or masked, because another rule has chosen; float32 checks that it was followed

The bound is twice the largest error of transformers itself, which also computes the reference outputs in bfloat16. So a
model that is more sensitive to rounding gets a wider bound, and a larger error of Tandem's does not pass because a
fixed bound was generous.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from tandem_engine.engine import Engine
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.path import Path
from tandem_lab.verify.reference import ReferenceOutput, Scored

LOGPROB_TOLERANCE = 1e-4

MAX_ROUNDING = 0.01
"""Above this no model is verified, however sensitive it is to rounding."""

ROUNDED_KV_TOLERANCE = 0.05
"""Where KV has another dtype than the model: what differs in the last bit may be rounded to the other side."""

RIVALS = 4
"""Likeliest tokens whose logprobs are asked for there, to tell a tie from a difference."""

PAUSE_EVERY = 7
"""Turns: a retracted prompt has time to be computed again in between."""

Generate = Callable[[Sequence[GenerateRequest], int], list[Generation]]
"""(requests, steps between arrivals) → one generation per request, in order."""


class PathResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    path: str
    requests: int
    tokens: int
    cached_tokens: int
    retractions: int
    accepted_drafts: int
    max_logprob_difference: float
    seconds: float
    difference: str | None
    """The first thing that differs, in words; None when all is equal."""
    not_exercised: str | None = None
    """What the path did not do although it is named after it; None when it did. Then equal outputs prove nothing."""

    @property
    def equal(self) -> bool:
        return self.difference is None

    @property
    def result(self) -> str:
        """One of its own words for a table."""
        if self.difference is not None:
            return self.difference
        return "equal" if self.not_exercised is None else f"not exercised: {self.not_exercised}"


def not_run(path: Path, reason: str) -> PathResult:
    """Of a path that engines of this model do not take."""
    return PathResult(
        path=path.name,
        requests=0,
        tokens=0,
        cached_tokens=0,
        retractions=0,
        accepted_drafts=0,
        max_logprob_difference=0.0,
        seconds=0.0,
        difference=None,
        not_exercised=reason,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    difference: str | None
    max_logprob_difference: float


def requests_for(
    path: Path, references: Sequence[ReferenceOutput], max_tokens: int, tag: str, *, rivals: int = 0
) -> list[GenerateRequest]:
    """One greedy request per reference, with logprobs, and those of so many likeliest tokens at each place."""
    return [
        GenerateRequest(
            rid=f"{tag}-{i}",
            input_ids=reference.prompt,
            group=f"{tag}-{i // path.choices}" if path.choices > 1 else "",
            adapter=reference.adapter,
            priority=i if path.rising_priority else 0,
            resume_ids=reference.token_ids[: len(reference.token_ids) // 2] if path.resume else (),
            sampling=msgspec.structs.replace(
                reference.edits or SamplingParams(max_tokens=max_tokens),
                max_tokens=max_tokens,
                temperature=0.0,
                logprobs=rivals,
                ignore_eos=reference.ignore_eos,
                grammar=reference.grammar,
                reasoning_budget=reference.reasoning_budget,
            ),
        )
        for i, reference in enumerate(references)
    ]


def compare(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[Generation],
    references: Sequence[ReferenceOutput],
    *,
    rounded_kv: bool = False,
) -> Comparison:
    """The first difference in tokens or logprobs, and the largest logprob difference up to there.

    `rounded_kv`: logprobs may differ by more, and an output is compared up to the place where two tokens are as likely
    as that: either may come next.
    """
    worst, tolerance = 0.0, tolerance_of(rounded_kv=rounded_kv)
    for request, output, reference in zip(requests, outputs, references, strict=True):
        wrong = prompt_difference(request, output, reference, tolerance)
        if wrong is not None:
            return Comparison(difference=wrong, max_logprob_difference=worst)
        start = len(request.resume_ids)
        tokens = (*request.resume_ids, *output.token_ids)
        end = _first_tie(output, tokens, reference, tolerance) if rounded_kv else None
        if tokens != reference.token_ids and end is None:
            return Comparison(
                difference=token_difference(request, tokens, reference, output), max_logprob_difference=worst
            )
        if len(output.logprobs) != len(output.token_ids):
            text = f"{request.rid}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens"
            return Comparison(difference=text, max_logprob_difference=worst)
        for i, (mine, truth) in enumerate(zip(output.logprobs, reference.logprobs[start:end], strict=end is None)):
            apart = abs(mine.logprob - truth)
            worst = max(worst, apart)
            if not apart <= tolerance:  # as of what is no number
                text = f"{request.rid}: logprob {mine.logprob:.6f} at output {start + i}, reference {truth:.6f}"
                return Comparison(difference=text, max_logprob_difference=worst)
    return Comparison(difference=None, max_logprob_difference=worst)


def tolerance_of(*, rounded_kv: bool) -> float:
    """How far logprobs may be from each other."""
    return ROUNDED_KV_TOLERANCE if rounded_kv else LOGPROB_TOLERANCE


def _first_tie(output: Generation, tokens: Sequence[int], reference: ReferenceOutput, tolerance: float) -> int | None:
    """Where the tokens first differ, if the reference's is about as likely there as the one that was chosen."""
    pairs = enumerate(zip(tokens, reference.token_ids, strict=False))
    at = next((i for i, (mine, truth) in pairs if mine != truth), None)
    place = -1 if at is None else at - (len(tokens) - len(output.token_ids))
    if not 0 <= place < len(output.logprobs):
        return None
    chosen, rivals = output.logprobs[place].logprob, dict(output.logprobs[place].top)
    return at if chosen - rivals.get(reference.token_ids[at or 0], -inf) <= tolerance else None


def prompt_difference(
    request: GenerateRequest, output: Generation, reference: ReferenceOutput, tolerance: float
) -> str | None:
    """What is wrong with the prompt's logprobs; nothing, when they were not asked for and did not come."""
    if request.sampling.prompt_logprobs is None:
        return None if output.prompt_logprobs is None else f"{request.rid}: prompt logprobs that were not requested"
    first, *rest = output.prompt_logprobs or (None,)
    mine = [entry.logprob for entry in rest if entry is not None]
    if first is not None or len(mine) != len(reference.prompt_logprobs):
        return f"{request.rid}: {len(mine)} prompt logprobs for {len(reference.prompt) - 1} predicted tokens"
    for at, (value, truth) in enumerate(zip(mine, reference.prompt_logprobs, strict=True), 1):
        if not abs(value - truth) <= tolerance:  # as of what is no number
            return f"{request.rid}: logprob {value:.6f} of prompt token {at}, reference {truth:.6f}"
    return None


def token_difference(
    request: GenerateRequest, tokens: Sequence[int], reference: ReferenceOutput, output: Generation
) -> str:
    """The first difference of `tokens`, those it resumes after included, from the reference's, in words."""
    expected = reference.token_ids
    at = next(
        (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected))
    )
    mine = tokens[at] if at < len(tokens) else f"end ({output.finish.reason.value}: {output.finish.error or ''})"
    truth = expected[at] if at < len(expected) else "end"
    return f"{request.rid} (prompt of {len(request.input_ids)}): output {at} is {mine}, reference {truth}"


def generate_on(engine: Engine, *, pause: PauseMode | None = None) -> Generate:
    """Drive one engine alone; with `pause`, stop it that way and let it continue every `PAUSE_EVERY` turns."""

    def operate() -> None:
        if pause is not None and engine.scheduler.tally.loops % PAUSE_EVERY == 0:
            engine.scheduler.pause(pause)
            engine.step()
            engine.scheduler.resume()

    def generate(requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        return engine.generate(requests, steps_between=stagger, before_turn=operate)

    return generate


MARGIN = 2.0
"""Bound over the largest error of transformers: other outputs than the measured ones have other largest errors."""

MIN_BOUND = 0.02
"""In nats; for models so small that transformers' own error means little."""

Score = Callable[[Sequence[int], Sequence[int]], Scored]
"""(tokens before, tokens) → what the reference gives for the latter."""


def logprob_bound(
    truth: Score, rounded: Score, references: Sequence[ReferenceOutput], *, least: float = MIN_BOUND
) -> float:
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
    return max(least, MARGIN * max(errors))


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
