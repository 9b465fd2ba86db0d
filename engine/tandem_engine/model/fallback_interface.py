"""The attention interface of transformers, and a model of it apart from its output head.

transformers looks a layer's attention up by name and passes it q, k and v, and every keyword that the model is called
with. The `Attend` of a step is such a keyword, and `paged_attention`, registered once per process, has no state:

    model(input_ids, position_ids, tandem_attend=attend) ─▶ layer ─▶ paged_attention(module, q, k, v, …,
                                                                      tandem_attend=attend)

transformers builds no masks for a name that its mask interface lacks: the `Attend` defines what a token may
see.

Models scale, cap or shift their logits in the function that also runs the layers. That function is kept, and the layers
in it are replaced by a module that returns given hidden states.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.attention.backend import Attend

NAME = "tandem_paged"
ATTEND = "tandem_attend"
OBSERVE = "tandem_observe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What one layer passed to the interface about its attention, next to q, k and v."""

    module: nn.Module
    head_dim: int
    mask: object
    options: dict[str, Any]


class Observe(Protocol):
    """Called before each call is answered. Only while a model is examined."""

    def __call__(self, call: Call) -> None: ...


def register() -> None:
    """Make `NAME` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    tandem_attend: Attend | None = None,
    tandem_observe: Observe | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, H, T, D], key and value [1, KV, T, D] to [1, T, H, D].

    The options are those of the layer's `AttentionSpec`; they were read when the model was examined.

    Raises:
        CheckpointError: the model keeps what it was called with from its layers.
    """
    if tandem_attend is None:
        raise CheckpointError(
            f"{type(module).__name__} does not get the arguments of the model in this version of transformers, "
            "so its attention cannot be replaced"
        )
    if tandem_observe is not None:
        tandem_observe(Call(module=module, head_dim=query.shape[-1], mask=attention_mask, options=options))
    q, k, v = (rows[0].transpose(0, 1).contiguous() for rows in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return tandem_attend(layer, q, k, v).view(1, *q.shape), None


@dataclass
class LayersOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """Has every field that some model looks for after its layers."""

    cross_attentions: tuple[Tensor, ...] | None = None


class GivesBack(nn.Module):
    """Stands for the layers: embeddings in, the same out as hidden states. It has their numbers, which heads read."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        for name, value in vars(body).items():
            if isinstance(value, int | float) and not name.startswith("_"):
                setattr(self, name, value)

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
        model.set_submodule(name, GivesBack(body))
        return body, cls(model, name)

    @contextlib.contextmanager
    def whole(self, body: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """The model as transformers built it, with its layers `body` and its own attention."""
        self._model.set_submodule(self._name, body)
        self._model.set_attn_implementation("eager")
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(NAME)
            self._model.set_submodule(self._name, GivesBack(body))

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to float32 logits [N, vocab]."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(torch.float32)
