"""Tensors of a PEFT adapter: which matrix of which projection each of them is.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight     A [r, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight     B [out, r]

In checkpoints of vision models the language model's part begins `model.language_model.` instead of `model.`. Both name
the same layers here. Everything else that PEFT can store is refused by the name of what it is.

Projections with the same input are one matrix in our layers (`Site`), or a few that stand one behind the other, so an
adapter of them is a sum of `part`s.
"""

import re
from enum import Enum
from typing import NamedTuple

from tandem_engine.model.checkpoint_folder import shown


class Site(Enum):
    """A matrix product of a layer, with the projections that it consists of, in the order of its outputs."""

    QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    OUTPUT = ("self_attn.o_proj",)
    GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
    DOWN = ("mlp.down_proj",)

    @property
    def column_parallel(self) -> bool:
        """Ranks share its outputs; of other sites they share the inputs."""
        return self in (Site.QKV, Site.GATE_UP)


PLAIN = {projection: site for site in Site for projection in site.value}
"""Of attention over keys and values, and of feed-forward blocks."""

RECURRENT = {
    **{f"linear_attn.in_proj_{name}": Site.QKV for name in ("qkvz", "ba", "qkv", "z", "b", "a")},
    "linear_attn.out_proj": Site.OUTPUT,
}
"""Of layers with states, in Qwen3-Next and Qwen3.5, where attention stands in other layers."""

SITES = PLAIN | RECURRENT


class Matrix(NamedTuple):
    """A or B of one projection."""

    layer: int
    projection: str
    """Within its layer, such as `self_attn.q_proj`."""
    module: str
    """The projection's name in the checkpoint of the base, as patterns of the config see it."""
    is_a: bool

    @property
    def base_weight(self) -> str:
        """The matrix that it adds to, by its name in a language model's checkpoint."""
        return f"model.layers.{self.layer}.{self.projection}.weight"


_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.(?:language_model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\."
    r"(?P<projection>[a-z_]+\.[a-z_]+))\.lora_(?P<matrix>[AB])\.weight"
)

_JOINED = "belongs to an adapter of projections that its base joins in one matrix, which is not supported"

_OTHERS = (
    (".lora_embedding_", "belongs to an adapter of an embedding, which is not supported"),
    (".lora_magnitude_vector", "belongs to a DoRA adapter, which is not supported"),
    (".lora_B.bias", "is a bias of an adapter, which is not supported"),
    (".visual.", "belongs to the vision part of a model; only its language model can have adapters"),
    (".vision_tower.", "belongs to the vision part of a model; only its language model can have adapters"),
    (".shared_expert", "belongs to an adapter of a shared expert, which is not supported"),
    (".experts", "belongs to an adapter of experts, which is not supported"),
    *((f".{name}.", _JOINED) for name in ("qkv_proj", "gate_up_proj")),
    (".lora_", "belongs to an adapter of a module that is no projection of attention or of a feed-forward block"),
)


def parse_name(name: str) -> Matrix | str:
    """Which matrix the tensor `name` is, or what is wrong with it."""
    match = _NAME.fullmatch(name)
    if match is not None and match["projection"] in SITES:
        return Matrix(int(match["layer"]), match["projection"], match["module"], match["matrix"] == "A")
    reason = next((reason for part, reason in _OTHERS if part in name), None)
    return f"tensor {shown(name)} " + (reason or "is no matrix of a LoRA adapter, such as a fully trained module")
