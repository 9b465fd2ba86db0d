"""The experts of a layer on a device, all at once. Importing this module requires Triton.

`mlp` documents what they compute and where they round. Experts are read one after the other into two stacks, of gate
with up and of down, so that no second copy of all of them is held. A stack is packed if all of its matrices can be
packed alike, else it is in the model's dtype.

Each expert has its own order of inputs (GPTQ's act-order). That of down becomes an order of the outputs of gate and up,
which costs nothing; that of gate and up is kept, and their kernel gets rows of x in that order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tandem_engine.config import Activation, GateClamp
from tandem_engine.kernels.interface import PackedWeight
from tandem_engine.kernels.triton.common import facts_of
from tandem_engine.kernels.triton.expert_tiles import ExpertTiles, every_tile
from tandem_engine.kernels.triton.fused_moe import (
    ExpertBiases,
    ExpertWeights,
    fused_experts,
    inputs_of,
    num_experts_of,
)
from tandem_engine.kernels.triton.norm_activation import Clamp
from tandem_engine.kernels.triton.quantized_moe import FEW_ROWS
from tandem_engine.model.layers.mlp import Router, SharedBlock
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.layers.triton import in_order, packed_weight
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.parallel.group import TpGroup

Matrix = Tensor | Levels


class ExpertMatrices(NamedTuple):
    """Of one expert, or this rank's part of them, where they are to stay."""

    gate_up: Matrix
    """[2 * I, hidden], gate first."""
    down: Matrix
    """[hidden, I]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceExperts:
    """`SparseFeedForward` with all experts computed at once; the host does not wait for the choice of experts."""

    norm: Norm
    router: Router
    weights: "ExpertStacks"
    activation: Activation
    clamp: Clamp | None
    biases: ExpertBiases | None
    group: TpGroup
    shared: SharedBlock | None
    weighted_inputs: bool
    """See `SparseFeedForward.weighted_inputs`."""

    @classmethod
    def of(
        cls,
        weights: "ExpertStacks",
        *,
        norm: Norm,
        router: Router,
        activation: Activation,
        group: TpGroup,
        clamp: GateClamp | None = None,
        biases: ExpertBiases | None = None,
        shared: SharedBlock | None = None,
        weighted_inputs: bool = False,
    ) -> Self:
        """The block of these experts. Its kernels are compiled, on a device."""
        layer = cls(
            norm=norm,
            router=router,
            weights=weights,
            activation=activation,
            clamp=None if clamp is None else Clamp(clamp.alpha, clamp.limit),
            biases=biases,
            group=group,
            shared=shared,
            weighted_inputs=weighted_inputs,
        )
        layer._warm_up()
        return layer

    def __call__(self, normed: Tensor) -> Tensor:
        """See `FeedForward`."""
        return self.chosen(normed, *self.router(normed))

    def chosen(self, normed: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See `SparseFeedForward.chosen`."""
        if self.weighted_inputs:
            total = self._of_weighted(normed, experts, weights)
        else:
            total = self._computed(normed, experts, weights)
        return self.group.all_reduce(total if self.shared is None else total.add_(self.shared(normed)))

    def _of_weighted(self, normed: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each pair of a token and an expert counts as a token with one expert, whose weight is 1."""
        inputs = (normed[:, None] * weights[..., None]).flatten(0, 1)
        results = self._computed(inputs, experts.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return results.view(*experts.shape, normed.shape[1]).sum(dim=1)

    def _computed(self, normed: Tensor, experts: Tensor, weights: Tensor, tiles: ExpertTiles | None = None) -> Tensor:
        held = self.weights
        return fused_experts(
            normed,
            experts,
            weights,
            held.gate_up,
            held.down,
            activation=self.activation.value,
            clamp=self.clamp,
            biases=self.biases,
            order=held.order,
            tiles=tiles,
        )

    def _warm_up(self) -> None:
        """No request waits for a compiler: run what few tokens take, and what many do."""
        held, chosen = self.weights, self.router.experts_per_token
        if not held.any_packed:
            self._warm_up_plain()
            return
        many = FEW_ROWS * num_experts_of(held.gate_up) // chosen + 1
        x = torch.zeros((many, held.hidden_size), dtype=held.dtype, device=held.device)
        experts = torch.zeros((many, chosen), dtype=torch.int64, device=held.device)
        for tokens in (1, many):
            self._computed(x[:tokens], experts[:tokens], x[:tokens, :1].expand(-1, chosen).contiguous())

    def _warm_up_plain(self) -> None:
        """One token by every tile."""
        held, chosen = self.weights, self.router.experts_per_token
        if self.weighted_inputs:
            chosen = 1
        x = torch.zeros((1, held.hidden_size), dtype=held.dtype, device=held.device)
        experts = torch.zeros((1, chosen), dtype=torch.int64, device=held.device)
        for tiles in every_tile(held.dtype, shared_bytes=facts_of(held.device).shared_bytes):
            self._computed(x, experts, torch.zeros_like(experts, dtype=held.dtype), tiles)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStacks:
    """The matrices of all experts of a layer."""

    gate_up: ExpertWeights
    """[E, 2 * I, hidden]"""
    down: ExpertWeights
    """[E, hidden, I]"""
    order: Tensor | None
    """int32 [E, hidden]: the inputs of each `gate_up` in the order of their groups, where one has them otherwise."""
    dtype: torch.dtype
    """Of the model."""
    device: torch.device

    @property
    def any_packed(self) -> bool:
        return any(isinstance(stack, PackedWeight) for stack in (self.gate_up, self.down))

    @property
    def hidden_size(self) -> int:
        return inputs_of(self.gate_up)


def stacked_biases(biases: Sequence[tuple[Tensor, Tensor | None]]) -> ExpertBiases:
    """Of all experts, from those of each."""
    down = [each for _, each in biases if each is not None]
    return ExpertBiases(torch.stack([gate_up for gate_up, _ in biases]), torch.stack(down) if down else None)


def read_experts(
    held: Callable[[int], ExpertMatrices],
    plain: Callable[[int], ExpertMatrices],
    *,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertStacks:
    """Stacks of `count` experts as they are to be held; of `plain` ones where those are not alike."""
    stacks = _stacked(held, count, dtype, device) or _stacked(plain, count, dtype, device)
    assert stacks is not None, "plain matrices have one format"
    return stacks


def _stacked(
    read: Callable[[int], ExpertMatrices], count: int, dtype: torch.dtype, device: torch.device
) -> ExpertStacks | None:
    """None where experts differ in kind."""
    gate_up, down, orders = _Stack(count=count), _Stack(count=count), _Orders(count=count)
    for expert in range(count):
        ready, order = _ready(read(expert))
        orders.put(expert, order, ready.gate_up.shape[1])
        if not (gate_up.put(expert, ready.gate_up) and down.put(expert, ready.down)):
            return None
    return ExpertStacks(gate_up=gate_up.whole(), down=down.whole(), order=orders.held, dtype=dtype, device=device)


def _ready(matrices: ExpertMatrices) -> tuple[ExpertMatrices, Tensor | None]:
    """Inputs in the order of their groups, and that order of those of gate and up."""
    gate_up, down = matrices
    order = None
    if isinstance(down, Levels):
        down, inner = in_order(down)
        if inner is not None:
            both = torch.cat((inner, inner + len(inner)))
            gate_up = gate_up.outputs(both) if isinstance(gate_up, Levels) else gate_up.index_select(0, both)
    if isinstance(gate_up, Levels):
        gate_up, order = in_order(gate_up)
    return ExpertMatrices(gate_up, down), order


@dataclass(kw_only=True, slots=True)
class _Stack:
    """One matrix of each expert, put in place as it is read."""

    count: int
    held: ExpertWeights | None = None

    def put(self, expert: int, matrix: Matrix) -> bool:
        """False where it is of another kind than those before."""
        part = matrix if isinstance(matrix, Tensor) else packed_weight(matrix)
        if isinstance(part, Tensor):
            if self.held is None:
                self.held = part.new_empty(self.count, *part.shape)
            if not isinstance(self.held, Tensor):
                return False
            self.held[expert] = part
            return True
        if self.held is None:
            self.held = part.room_for(self.count)
        if not (isinstance(self.held, PackedWeight) and self.held.is_like(part)):
            return False
        self.held.put(expert, part)
        return True

    def whole(self) -> ExpertWeights:
        """Of all experts."""
        assert self.held is not None, "no expert was read"
        return self.held if isinstance(self.held, Tensor) else self.held.lean()


@dataclass(kw_only=True, slots=True)
class _Orders:
    """Of the inputs of each expert; nothing while all are in order."""

    count: int
    held: Tensor | None = None
    """int32 [count, inputs]"""

    def put(self, expert: int, order: Tensor | None, inputs: int) -> None:
        if order is None:
            return
        if self.held is None:
            self.held = torch.arange(inputs, dtype=torch.int32, device=order.device).repeat(self.count, 1)
        self.held[expert] = order
