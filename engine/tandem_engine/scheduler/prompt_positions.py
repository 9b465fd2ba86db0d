"""Prompt tokens that a step can score and somebody wants scored, as the device finds them."""

from collections.abc import Sequence

import torch

from tandem_engine.forward.forward_batch import PromptPositions
from tandem_engine.scheduler.prefill_adder import Extend


def prompt_positions(extends: Sequence[Extend]) -> tuple[PromptPositions, ...]:
    """What the step of `extends`, whose tokens come first and in this order, yields of their prompts' logprobs."""
    if all(extend.req.prompt_logprobs is None for extend in extends):
        return ()
    wanted, offset = [], 0
    for sequence, extend in enumerate(extends):
        positions = _of_extend(extend, sequence, offset)
        if positions is not None:
            wanted.append(positions)
        offset += extend.stop - extend.start
    return tuple(wanted)


def _of_extend(extend: Extend, sequence: int, offset: int) -> PromptPositions | None:
    """`offset`: where the tokens of the extend begin in the step."""
    collection = extend.req.prompt_logprobs
    positions = range(0) if collection is None else collection.positions(extend.start, extend.stop)
    if collection is None or not positions:
        return None
    tokens = torch.arange(positions.start, positions.stop) - 1 - extend.start + offset
    return PromptPositions(
        sequence=sequence,
        first=positions.start,
        tokens=tokens,
        token_ids=torch.tensor(extend.req.origin_input_ids[positions.start : positions.stop]),
        top=collection.top,
    )
