"""The model's part of a step: hidden states of the tokens that anybody asks for."""

import torch
from torch import Tensor

from tandem_engine.executor.interface import HiddenObserver
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.model.base import Attend, CausalLM


def hidden_states(
    model: CausalLM,
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
        return model.forward(input_ids, batch.positions, attend, wanted)
    everything = torch.arange(batch.num_tokens, device=input_ids.device)
    hidden = model.forward(input_ids, batch.positions, attend, everything)
    observer.observe(hidden, batch.out_cache_loc)
    return hidden.index_select(0, wanted)
