"""What a model of transformers does after its layers: from hidden states to logits.

Models scale, cap or shift their logits each in their own way, inside the same function that runs the layers.
So that function is kept, and the layers taken out of it: in their place stands a module that gives back the
hidden states it is given.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from tandem_engine.errors import CheckpointError
from tandem_engine.model.fallback.interface import NAME


@dataclass
class LayersOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """Has every field that some model looks for after its layers."""

    cross_attentions: tuple[Tensor, ...] | None = None


class GivesBack(nn.Module):
    """Stands for the layers: embeddings in, the same out as hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> LayersOutput:
        return LayersOutput(last_hidden_state=inputs_embeds)


class Head:
    """The rest of a causal language model without its layers."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model = model
        self._name = name
        """Of the layers within the model."""

    @classmethod
    def split(cls, model: PreTrainedModel) -> tuple[PreTrainedModel, "Head"]:
        """Take `model` apart into its layers and its head. `model` itself is used up.

        Raises:
            CheckpointError: it has no layers that can be taken out.
        """
        body = model.get_decoder()
        name = next((name for name, module in model.named_modules() if module is body), "")
        if not name:
            raise CheckpointError(f"{type(model).__name__} has no decoder apart from its output head")
        model.set_submodule(name, GivesBack())
        return body, cls(model, name)

    @contextlib.contextmanager
    def whole(self, body: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """The model as transformers built it, with its layers `body` and attention of its own."""
        self._model.set_submodule(self._name, body)
        self._model.set_attn_implementation("eager")
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(NAME)
            self._model.set_submodule(self._name, GivesBack())

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to float32 logits [N, vocab]."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(torch.float32)
