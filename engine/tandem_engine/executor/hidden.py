"""The model's part of a step: hidden states of the tokens that anybody asks for."""

import torch
from torch import Tensor

from tandem_engine.executor.interface import HiddenObserver
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.model.base import Attend, DraftHead, StepModel


def hidden_states(
    model: StepModel,
    observer: HiddenObserver | None,
    batch: ForwardBatch,
    *,
    input_ids: Tensor,
    attend: Attend,
    wanted: Tensor,
) -> Tensor:
    """[W, hidden_size] of the tokens `wanted` [W] of `batch`, whose `input_ids` are resolved.

    An `observer` is shown all tokens', which costs the last layer's shortcut.
    """
    if observer is None:
        return _compute(model, batch, input_ids, attend, wanted)
    every = torch.arange(batch.num_tokens, device=input_ids.device)
    return every_hidden_state(model, observer, batch, input_ids=input_ids, attend=attend, every=every).index_select(
        0, wanted
    )


def every_hidden_state(
    model: StepModel,
    observer: HiddenObserver | None,
    batch: ForwardBatch,
    *,
    input_ids: Tensor,
    attend: Attend,
    every: Tensor,
) -> Tensor:
    """[T, hidden_size] of all tokens of `batch`, whose indices are `every` [T]; `observer` is shown them."""
    hidden = _compute(model, batch, input_ids, attend, every)
    if observer is not None:
        observer.observe(hidden, batch.out_cache_loc)
    return hidden


def keep_guesses(model: StepModel, batch: ForwardBatch, hidden: Tensor, wanted: Tensor) -> None:
    """Let a head remember what it made of the tokens `wanted` [S], `hidden` [S, hidden_size]."""
    if isinstance(model, DraftHead):
        model.keep(hidden, batch.out_cache_loc.index_select(0, wanted))


def _compute(model: StepModel, batch: ForwardBatch, input_ids: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
    if isinstance(model, DraftHead):
        return model.forward(batch, input_ids, attend, wanted)
    return model.forward(input_ids, batch.positions, attend, wanted)
