"""Our end of transformers' attention interface.

transformers looks a layer's attention up by name and hands it q, k and v; whatever keyword a model is called
with travels along to it. So the `Attend` of a step is such a keyword, and the function below, which is
registered once per process, holds no state:

    model(input_ids, position_ids, tandem_attend=attend) ─▶ layer ─▶ paged_attention(module, q, k, v, …,
                                                                      tandem_attend=attend)

A name that transformers' mask interface does not know also tells it to build no masks: what a token may see
is the business of the `Attend`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from tandem_engine.errors import CheckpointError
from tandem_engine.model.base import Attend

NAME = "tandem_paged"
ATTEND = "tandem_attend"
OBSERVE = "tandem_observe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What one layer told the interface about its attention, besides q, k and v."""

    module: nn.Module
    head_dim: int
    mask: object
    options: dict[str, Any]


class Observe(Protocol):
    """Told of every call, before it is answered. Only while a model is examined."""

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

    The options say what the layer's `AttentionSpec` says; they were read when the model was examined.

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
