"""Edits of logits the plain way: one row, one token at a time, from the whole history, in Python's own numbers."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from tandem_engine.messages.sampling import SamplingParams


def edited_logits(
    logits: Sequence[float],
    sampling: SamplingParams,
    *,
    prompt: Sequence[int],
    outputs: Sequence[int],
    suppress: Collection[int] = (),
    masked: Collection[int] = (),
) -> list[float]:
    """What `sampling` makes of `logits` [V] after `outputs`; its grammar forbids `masked`."""
    penalized = _penalized(logits, sampling, prompt, outputs)
    edited = [-math.inf if token in masked else logit for token, logit in enumerate(penalized)]
    for token, bias in sampling.logit_bias:
        edited[token] += bias
    if sampling.allowed_token_ids:
        edited = [logit if token in sampling.allowed_token_ids else -math.inf for token, logit in enumerate(edited)]
    forbidden = {*suppress, *completing(sampling, outputs)}
    left = [-math.inf if token in forbidden else logit for token, logit in enumerate(edited)]
    return edited if sampling.allowed_token_ids and max(left) == -math.inf else left


def completing(sampling: SamplingParams, outputs: Sequence[int]) -> set[int]:
    """Tokens that would complete a bad word."""
    return {
        word[-1]
        for word in sampling.bad_words
        if len(outputs) >= len(word) - 1 and tuple(outputs[len(outputs) - len(word) + 1 :]) == word[:-1]
    }


def most_likely_token(logits: Sequence[float]) -> int:
    """The first of equals."""
    return max(range(len(logits)), key=lambda token: (logits[token], -token))


def _penalized(
    logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
) -> list[float]:
    counts = Counter(outputs)
    penalized = [*logits]
    for token in {*prompt, *outputs}:
        strength = sampling.repetition_penalty
        penalized[token] = penalized[token] / strength if penalized[token] > 0 else penalized[token] * strength
    for token, count in counts.items():
        penalized[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return penalized
