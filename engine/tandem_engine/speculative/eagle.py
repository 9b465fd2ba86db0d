"""A draft head in the manner of EAGLE: one block that continues the target's hidden states.

    token at position i      ─▶ target's embedding ─┐
    hidden state of i − 1    ───────────────────────┴▶ fc ▶ block ▶ norm ─▶ drafted hidden state of i
                                                                     └▶ target's head ▶ draft of token i + 1

The hidden state of i − 1 is the target's for completed text, and the head's own for drafts. The head has its own
attention, over a pool of one layer with the page ids of the target's, and uses the target's embedding and output
matrix. The pair for token i is at slot i, so draft KV is a function of the same tokens as KV. EAGLE numbers the pair by
the hidden state, which makes it depend on one more token, and lengths differ by one between the two pools
[one-length-unit].

`HiddenStates` keeps the target's states for the head in the order of its KV:

    states[page * page_size + offset]   hidden state of the token whose KV is in that slot

Every forward of the target writes them after the model ran. A head's input at a position is the state one slot before,
in whichever step it was computed; a shared prefix shares its states too. One vector per token is a few per cent of its
KV. The newest token, and drafts after it, have the head's own state until the target computes and overwrites it.

A head's directory has config.json, which describes its block as a model of one layer, and its tensors:

    fc.weight                   [hidden_size, 2 * hidden_size]: embedding first, then hidden state
    model.layers.0.…            the block and the final norm, as a model of that family names them
    model.norm.weight

Embedding and output matrix are the target's and not stored. The files are checked as those of a model are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig, NormPlacement
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.kernels.interface import by_triton
from tandem_engine.model.attention.backend import Attend, AttentionSpec
from tandem_engine.model.base import DraftHead
from tandem_engine.model.blocks import Block, BlockBuilder
from tandem_engine.model.checkpoint import open_weights, parse_config
from tandem_engine.model.checkpoint_files import ReadableTensor
from tandem_engine.model.checkpoint_folder import open_directory, shown
from tandem_engine.model.decoder import attention_specs
from tandem_engine.model.layers.attention import RotaryTable, rotary_table
from tandem_engine.model.layers.linear import Projection, projection
from tandem_engine.model.layers.norm import Norm, rms_norm
from tandem_engine.model.loader import WeightReader
from tandem_engine.model.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    expected_shapes,
    require_weights,
)
from tandem_engine.model.weights import heads_of_rank

NOWHERE = -1
"""The slot of what is before the first token."""


class Features(NamedTuple):
    """Of a head whose states are made of what several layers of the target read (`eagle3`)."""

    layers: tuple[int, ...]
    fuse: Projection
    """[T, layers * hidden_size] to [T, hidden_size]."""


class HiddenStates:
    """Implements `HiddenObserver`. Used where forwards run, and in their order; waits for no device."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        features: Features | None = None,
    ) -> None:
        """`features`: what a state is made of; None is the target's last state itself."""
        self._features = features
        self._page_size = page_size
        self._states = torch.zeros(num_pages * page_size, hidden_size, dtype=dtype, device=device)

    @property
    def layers(self) -> tuple[int, ...]:
        """See `HiddenObserver.layers`."""
        return () if self._features is None else self._features.layers

    def observe(self, hidden: Tensor, out_cache_loc: Tensor) -> None:
        """See `HiddenObserver.observe`."""
        self.write(hidden if self._features is None else self._features.fuse(hidden), out_cache_loc)

    def write(self, hidden: Tensor, out_cache_loc: Tensor) -> None:
        """Keep states [T, hidden_size] of the tokens in these slots [T]."""
        if by_triton(self._states.device):
            from tandem_engine.kernels.triton.row_tables import scatter_rows

            scatter_rows(self._states, out_cache_loc, hidden)
        else:
            self._states.index_copy_(0, out_cache_loc, hidden)

    def before(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] the state before each token of `batch`: zeros for the first token of a sequence."""
        slots = self._slots_before(batch)
        if by_triton(self._states.device):
            from tandem_engine.kernels.triton.row_tables import gather_rows

            return gather_rows(self._states, slots)
        states = self._states.index_select(0, slots.clamp(min=0))
        return states.masked_fill_((slots == NOWHERE)[:, None], 0.0)

    def _slots_before(self, batch: ForwardBatch) -> Tensor:
        """[T] int64: of the token before in the batch, or, for the first of a sequence, of the last that it has."""
        firsts = batch.extend_lens.cumsum(0) - batch.extend_lens
        previous = batch.seq_lens - batch.extend_lens - 1
        inside = previous.clamp(min=0)
        pages = batch.page_table.gather(1, (inside // self._page_size).long()[:, None]).squeeze(1)
        last = (pages * self._page_size + inside % self._page_size).masked_fill(previous < 0, NOWHERE)
        return batch.out_cache_loc.roll(1).index_copy_(0, firsts, last.long())


class EagleTarget(Protocol):
    """What a head shares with the model it drafts for."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], past the final norm, to float32 [N, vocab_size]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleHead:
    """The weights."""

    fc: Projection
    """[T, 2 * hidden_size] to [T, hidden_size]."""
    block: Block
    norm: Norm
    rotary: RotaryTable
    token_norm: Norm | None = None
    """Of embeddings, before `fc` (`mtp`)."""
    state_norm: Norm | None = None
    """Of the states before, likewise."""

    def forward(self, embedded: Tensor, before: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """Guessed hidden states [S, hidden_size] of the tokens `wanted` [S].

        Args:
            embedded: [T, hidden_size]; before: [T, hidden_size], the state before each token.
            positions: [T] int64.
        """
        embedded = embedded if self.token_norm is None else self.token_norm(embedded)
        before = before if self.state_norm is None else self.state_norm(before)
        hidden = self.fc(torch.cat((embedded, before), dim=1))
        block = self.block
        gathered = block.attention.attend(0, block.attention.norm(hidden), self.rotary.at(positions), attend)
        hidden, gathered = hidden.index_select(0, wanted), gathered.index_select(0, wanted)
        normed = block.feed_forward.norm.of_sum(hidden, block.attention.project(gathered))
        return self.norm.of_sum(hidden, block.feed_forward(normed))


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleModel(DraftHead):
    """A head with what it shares: a model to runners."""

    facts: ModelConfig
    head: EagleHead
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
        embedded, before = self.target.embed(input_ids), self.states.before(batch)
        return self.head.forward(embedded, before, batch.positions, attend, wanted)

    def keep(self, hidden: Tensor, slots: Tensor) -> None:
        """See `DraftHead.keep`: where the target's states will be, once it has computed these tokens."""
        self.states.write(hidden, slots)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.target.logits(hidden)


FUSE = "fc.weight"
SHARED = (EMBEDDING, LM_HEAD)


def read_head_config(path: str, target: ModelConfig) -> ModelConfig:
    """The head's config, compared with the model it is to draft for and with the tensors beside it.

    Raises:
        CheckpointError: the folder is no head, or the head of another model.
    """
    directory = open_directory(path)
    config = parse_config(directory)
    if config.num_layers != 1:
        raise CheckpointError(
            f"{path} is a model of {config.num_layers} layers; --speculative-algorithm EAGLE takes a head of one, "
            "DRAFT a whole model"
        )
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the draft head in {path} reads hidden states of {config.hidden_size}, the model's have "
            f"{target.hidden_size}; use a head that was trained for this model"
        )
    if config.norm_placement is NormPlacement.SHARED or config.query_scale is not None or config.chunks:
        raise CheckpointError(
            f"the draft head in {path} is a block of the family {config.family}, which is not supported as a head; use "
            "a head with the block of another family"
        )
    require_head(head_shapes(config), _tensors(path, config), where=directory.path)
    return config


def load_head(path: str, config: ModelConfig, *, dtype: torch.dtype, device: str, positions: int) -> EagleHead:
    """Read the weights of a head whose config `read_head_config` has accepted. Raises `CheckpointError`."""
    place = torch.device(device)
    weights = WeightReader(tensors=_tensors(path, config), dtype=dtype, device=place, advance=lambda _size: None)
    rope = config.second_rope if 0 in config.second_layers else None
    return EagleHead(
        fc=projection(weights.stacked(FUSE)),
        block=BlockBuilder(config=config, weights=weights, heads=heads_of_rank(config, 1)).block(0),
        norm=rms_norm(weights.stacked(FINAL_NORM), eps=config.rms_eps, kind=config.norm),
        rotary=rotary_table(
            rope or config.rope, head_dim=config.rotary_heads, positions=positions, dtype=dtype, device=place
        ),
    )


def _tensors(path: str, config: ModelConfig) -> dict[str, ReadableTensor]:
    return open_weights(open_directory(path), None, config)


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every tensor in the folder of a head."""
    block = {name: shape for name, shape in expected_shapes(config).items() if name not in SHARED}
    return {FUSE: (config.hidden_size, 2 * config.hidden_size), **block}


def require_head(shapes: dict[str, tuple[int, ...]], tensors: dict[str, ReadableTensor], *, where: Path) -> None:
    """Raise `CheckpointError` unless the `tensors` in the folder `where` are those of `shapes`."""
    for name, shape in shapes.items():
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointError(f"the draft head in {where} lacks tensor {name}")
        require_weights(stored, shape)
    unknown = sorted(tensors.keys() - shapes.keys())
    if unknown:
        raise CheckpointError(f"tensor {shown(unknown[0])} is no part of a draft head; {where} has it")
