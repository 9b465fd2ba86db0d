"""Edited logits, as transformers has them: what paths with `edited` compare with.

For repetition_penalty, logit_bias and bad_words transformers has processors of its own; presence and frequency
penalties are written down here the plain way. The order is that of `sampling.editor`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tandem_engine.messages.sampling import SamplingParams

Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids [1, n], logits [1, V]) → logits [1, V], as transformers' `LogitsProcessor`."""


def edits_against(output: Sequence[int]) -> SamplingParams:
    """Edits that turn a plain greedy `output` elsewhere: what it repeats, begins with and goes on with is disliked."""
    return SamplingParams(
        max_tokens=1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=tuple({token: 0.75 * (-1) ** i for i, token in enumerate(output[:6])}.items()),
        bad_words=((output[-1],), *dict.fromkeys(pairwise(output[2:]))),
        prompt_logprobs=0,
    )


def processors_for(sampling: SamplingParams, prompt_len: int) -> list[Processor]:
    """The processors that do to logits what `sampling` asks for after a prompt of `prompt_len` tokens."""
    from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    biases = {(token,): bias for token, bias in sampling.logit_bias}
    bad_words = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words])
    return [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        lambda ids, logits: _penalise_output(sampling, ids[:, prompt_len:], logits),
        SequenceBiasLogitsProcessor(biases),
        lambda ids, logits: bad_words(_without_prompt(ids, prompt_len), logits),
    ]


def _without_prompt(ids: Tensor, prompt_len: int) -> Tensor:
    """The output after one id that no word has: a bad word does not begin in the prompt.

    The id stands for a prompt of any length. Some releases of transformers look at no word that is longer than all
    that came before.
    """
    nothing = torch.full((1, 1), -1, dtype=ids.dtype)
    return torch.cat((nothing, ids[:, prompt_len:]), dim=1)


def _penalise_output(sampling: SamplingParams, output: Tensor, logits: Tensor) -> Tensor:
    counts = torch.bincount(output[0], minlength=logits.shape[1])
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
