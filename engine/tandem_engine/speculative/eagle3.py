"""A draft head in the manner of EAGLE-3: it reads what three layers of the target read, and has its own vocabulary.

    inputs of three layers, of i − 1  ─▶ fc ─▶ state ─▶ norm ─┐
    token at i  ─▶ embedding ─▶ norm ─────────────────────────┴▶ attention ─(+ state)─▶ feed-forward ─(+)─▶ new state
                                                                   new state ─▶ norm ─▶ head ─▶ draft of token i + 1

As in `eagle` the state of i − 1 is made of the target's features for completed text, and is the head's own new state
for drafts. Features are multiplied by `fc` as the target's forward computes them, so one state per token is kept, not
three.

A head's folder is as SpecForge and SGLang write it:

    config.json       a llama of one layer, with `draft_vocab_size`; `eagle_config` may name the layers
    fc.weight         [hidden_size, layers * hidden_size]
    midlayer.…        the layer: q, k and v read [embedding | state], and `hidden_norm` is the norm of the state
    norm.weight, lm_head.weight [draft_vocab_size, hidden_size]
    d2t               [draft_vocab_size] what is added to an id of the head for one of the target
    t2d               [vocab_size] which ids of the target the head has; it follows from d2t

`embed_tokens.weight` is there where the head does not use the target's.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.model.attention.backend import Attend, AttentionSpec
from tandem_engine.model.base import DraftHead
from tandem_engine.model.blocks import Block, BlockBuilder
from tandem_engine.model.checkpoint_files import StoredTensor, open_tensors
from tandem_engine.model.checkpoint_folder import open_directory, shown
from tandem_engine.model.config_fields import MAX_LAYERS, MAX_VOCAB, ConfigFields, read_fields
from tandem_engine.model.decoder import attention_specs
from tandem_engine.model.families.plain import LLAMA
from tandem_engine.model.layers.attention import RotaryTable, rotary_table
from tandem_engine.model.layers.linear import Projection, projection
from tandem_engine.model.layers.norm import Norm, rms_norm
from tandem_engine.model.loader import WeightReader
from tandem_engine.model.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_shapes, require_weights
from tandem_engine.model.weights import heads_of_rank
from tandem_engine.speculative.eagle import FUSE, EagleTarget, Features, HiddenStates

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
DRAFT_VOCABULARY = "draft_vocab_size"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE_CONFIG = "eagle_config"
OWN_FIELDS = (DRAFT_VOCABULARY, LAYER_IDS, EAGLE_CONFIG, "target_hidden_size")
NESTED_FIELDS = (LAYER_IDS, "use_aux_hidden_state")

TO_TARGET, OF_TARGET = "d2t", "t2d"
STATE_NORM = "model.layers.0.hidden_norm.weight"
_PREFIXES = {
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Facts:
    """What a head of this kind has beside its block."""

    layers: tuple[int, ...]
    """Of the target, whose inputs it reads; ascending."""
    vocabulary: int
    """Ids of the head."""
    has_embedding: bool


def is_eagle3(fields: ConfigFields) -> bool:
    """Whether config.json is that of such a head."""
    return fields.has(DRAFT_VOCABULARY) or any(name in ARCHITECTURES for name in fields.items("architectures"))


def read_eagle3(path: str, target: ModelConfig) -> tuple[ModelConfig, Eagle3Facts]:
    """The head's block and the rest of it, compared with the model it is to draft for and with its tensors.

    Raises:
        CheckpointError: the folder is no head of this kind, or the head of another model.
    """
    directory = open_directory(path)
    fields = read_fields(directory)
    values = {name: value for name, value in fields.values.items() if name not in OWN_FIELDS}
    config = LLAMA.parse(replace(fields, values={**values, "architectures": [LLAMA.architecture]}))
    if config.num_layers != 1:
        fields.refuse("num_hidden_layers", "must be 1 in a draft head")
    for name, size in (("hidden_size", config.hidden_size), ("target_hidden_size", None)):
        stated = fields.values.get(name) if size is None else size
        if stated not in (None, target.hidden_size):
            fields.refuse(name, f"must be that of the model, {target.hidden_size}; use a head that was trained for it")
    tensors = _tensors(path)
    facts = Eagle3Facts(
        layers=_layers(fields, target.num_layers),
        vocabulary=fields.integer(DRAFT_VOCABULARY, least=1, most=MAX_VOCAB, default=config.vocab_size),
        has_embedding=EMBEDDING in tensors,
    )
    if facts.vocabulary > config.vocab_size:
        fields.refuse(DRAFT_VOCABULARY, f"must be at most vocab_size ({config.vocab_size})")
    _require(config, facts, tensors, where=directory.path)
    _target_ids(path, config, facts)
    return config, facts


def _layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Layers by their inputs. SpecForge names layers by what they return, vLLM at the top by what they read."""
    nested = fields.inner(EAGLE_CONFIG)
    for name, value in nested.values.items():
        if name not in NESTED_FIELDS and value is not None:
            nested.refuse(name, "is no field of a draft head that is known")
    if not nested.flag("use_aux_hidden_state", default=True):
        nested.refuse("use_aux_hidden_state", "must be true in a head with draft_vocab_size")
    owner, shift = (nested, 1) if nested.has(LAYER_IDS) else (fields, 0)
    if not owner.has(LAYER_IDS):
        return tuple(sorted({2, num_layers // 2, num_layers - 3} & {*range(num_layers)}))
    layers: set[int] = set()
    for layer in owner.items(LAYER_IDS):
        if type(layer) is not int or not 0 <= layer + shift <= min(num_layers, MAX_LAYERS):
            owner.refuse(LAYER_IDS, f"must name layers of the model, which has {num_layers}")
        layers.add(layer + shift)
    return tuple(sorted(layers))


def _tensors(path: str) -> dict[str, StoredTensor]:
    return {
        _name(name): replace(tensor, name=_name(name)) for name, tensor in open_tensors(open_directory(path)).items()
    }


def _name(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def eagle3_shapes(config: ModelConfig, facts: Eagle3Facts) -> dict[str, tuple[int, ...]]:
    """Of every weight in the folder of a head, under our names."""
    size = config.hidden_size
    shapes = {name: shape for name, shape in expected_shapes(config).items() if name not in (EMBEDDING, LM_HEAD)}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = f"model.layers.0.self_attn.{name}.weight"
        shapes[weight] = (shapes[weight][0], 2 * size)
    own = {FUSE: (size, len(facts.layers) * size), STATE_NORM: (size,), LM_HEAD: (facts.vocabulary, size)}
    return shapes | own | ({EMBEDDING: (config.vocab_size, size)} if facts.has_embedding else {})


def _require(config: ModelConfig, facts: Eagle3Facts, tensors: dict[str, StoredTensor], *, where: Path) -> None:
    shapes = eagle3_shapes(config, facts)
    for name, shape in shapes.items():
        if name not in tensors:
            raise CheckpointError(f"the draft head in {where} lacks tensor {name}")
        require_weights(tensors[name], shape)
    maps = {TO_TARGET: (facts.vocabulary,), OF_TARGET: (config.vocab_size,)}
    for name, stored in tensors.items():
        if name not in shapes and maps.get(name) != stored.shape:
            raise CheckpointError(
                f"tensor {shown(name)} of shape {list(stored.shape)} is no part of a draft head; {where} has it"
            )
    if TO_TARGET not in tensors and facts.vocabulary != config.vocab_size:
        raise CheckpointError(f"the draft head in {where} lacks tensor {TO_TARGET}, which its draft_vocab_size needs")


def _target_ids(path: str, config: ModelConfig, facts: Eagle3Facts) -> Tensor:
    """int64 [vocabulary]: the id of the target for each id of the head."""
    own = torch.arange(facts.vocabulary)
    stored = _tensors(path).get(TO_TARGET)
    if stored is None:
        return own
    ids = own + stored.read().long()
    if len(torch.unique(ids)) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise CheckpointError(f"{stored.path}: tensor {TO_TARGET} must lead to different ids below {config.vocab_size}")
    return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Head:
    """The weights, but for `fc`."""

    block: Block
    state_norm: Norm
    norm: Norm
    rotary: RotaryTable
    scores: Projection
    """Normalized states to logits of the head's ids."""
    embedding: Tensor | None
    """[vocab, hidden_size]; None is the target's."""
    target_ids: Tensor
    """int64 [the head's ids]"""
    vocab_size: int
    """Of the target."""

    def forward(self, embedded: Tensor, before: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """New states [S, hidden_size] of the tokens `wanted` [S], before the final norm.

        Args:
            embedded: [T, hidden_size]; before: [T, hidden_size], the state before each token.
            positions: [T] int64.
        """
        block = self.block
        normed = torch.cat((block.attention.norm(embedded), self.state_norm(before)), dim=1)
        gathered = block.attention.attend(0, normed, self.rotary.at(positions), attend)
        state, gathered = before.index_select(0, wanted), gathered.index_select(0, wanted)
        fed = block.feed_forward(block.feed_forward.norm.of_sum(state, block.attention.project(gathered)))
        return state.add_(fed)

    def logits(self, state: Tensor) -> Tensor:
        """States [N, hidden_size] to float32 [N, vocab_size]; −∞ for ids that the head does not have."""
        own = self.scores(self.norm(state)).float()
        whole = own.new_full((len(own), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.target_ids, own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Model(DraftHead):
    """A head with what it shares: a model to runners."""

    facts: ModelConfig
    head: Eagle3Head
    target: EagleTarget
    states: HiddenStates

    @property
    def config(self) -> ModelConfig:
        return self.facts

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """See `CausalLM.attention`."""
        return attention_specs(self.facts, (self.head.block,))

    def forward(self, batch: ForwardBatch, input_ids: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """See `DraftHead.forward`."""
        own = self.head.embedding
        embedded = self.target.embed(input_ids) if own is None else own.index_select(0, input_ids)
        return self.head.forward(embedded, self.states.before(batch), batch.positions, attend, wanted)

    def keep(self, hidden: Tensor, slots: Tensor) -> None:
        """See `DraftHead.keep`: where the target's features will be, once it has computed these tokens."""
        self.states.write(hidden, slots)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.head.logits(hidden)


def _reader(path: str, *, dtype: torch.dtype, device: str) -> WeightReader:
    return WeightReader(tensors=_tensors(path), dtype=dtype, device=torch.device(device), advance=lambda _size: None)


def load_features(path: str, facts: Eagle3Facts, *, dtype: torch.dtype, device: str) -> Features:
    """What the states of a head that `read_eagle3` has accepted are made of. Raises `CheckpointError`."""
    return Features(facts.layers, projection(_reader(path, dtype=dtype, device=device).stacked(FUSE)))


def load_eagle3(
    path: str, config: ModelConfig, facts: Eagle3Facts, *, dtype: torch.dtype, device: str, positions: int
) -> Eagle3Head:
    """The rest of such a head. Raises `CheckpointError`."""
    weights = _reader(path, dtype=dtype, device=device)

    def norm(name: str) -> Norm:
        return rms_norm(weights.stacked(name), eps=config.rms_eps, kind=config.norm)

    return Eagle3Head(
        block=BlockBuilder(config=config, weights=weights, heads=heads_of_rank(config, 1)).block(0),
        state_norm=norm(STATE_NORM),
        norm=norm(FINAL_NORM),
        rotary=rotary_table(
            config.rope, head_dim=config.head_dim, positions=positions, dtype=dtype, device=torch.device(device)
        ),
        scores=projection(weights.stacked(LM_HEAD)),
        embedding=weights.stacked(EMBEDDING) if facts.has_embedding else None,
        target_ids=_target_ids(path, config, facts).to(device),
        vocab_size=config.vocab_size,
    )
