"""Feed-forward blocks: gated activations, and mixtures of experts.

In a mixture, a router selects a few of many small feed-forward blocks for each token.

    1. scores    softmax over all experts or the sigmoid of each, in float32; the best k of each token, with a bias or
                 from the best groups if so trained; their weights scaled to sum to 1 if so trained
    2. group     (token, expert) pairs are sorted by expert and their tokens gathered once, so that each expert is one
                 pair of matrix products over just its tokens; experts without tokens are skipped
    3. combine   a token's results are weighted and added, best expert first; then that of the shared expert. Some
                 models weight what experts read instead (`weighted_inputs`)

A token's results have separate places before they are added. So its output depends neither on the order of the groups
nor on the other tokens of its experts, except for the rounding that rows of one matrix product share in any layer.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import Activation, GateClamp, Scoring
from tandem_engine.kernels.interface import GatedActivation, by_triton
from tandem_engine.model.layers.linear import Delta, Projection, project
from tandem_engine.model.layers.norm import Norm
from tandem_engine.parallel.group import SingleRank, TpGroup


def gated(activation: Activation, device: torch.device, clamp: GateClamp | None = None) -> GatedActivation:
    """The activation of a block whose weights are on `device`. On devices experts alone clamp, by their own kernels."""
    if clamp is not None:
        return partial(clamp_and_multiply, clamp=clamp)
    if by_triton(device):
        from tandem_engine.model.layers.triton import device_activation

        return device_activation(activation)
    return GATED[activation]


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """SwiGLU's middle."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_multiply(gate_up: Tensor) -> Tensor:
    """GeGLU's middle, GELU by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamp_and_multiply(gate_up: Tensor, *, clamp: GateClamp) -> Tensor:
    """The middle of gpt-oss."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(min=-clamp.limit, max=clamp.limit)
    return gate.mul(torch.sigmoid(gate * clamp.alpha)).mul_(up.add_(1))


GATED: dict[Activation, GatedActivation] = {
    Activation.SILU: silu_and_multiply,
    Activation.GELU_TANH: gelu_tanh_and_multiply,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """One pair of projections for every token."""

    norm: Norm
    """Before the block; applied by the decoder, which adds to the hidden states on the way."""
    gate_up: Projection
    activation: GatedActivation
    down: Projection
    output_norm: Norm | None

    def __call__(self, normed: Tensor) -> Tensor:
        """Normalized hidden states [T, hidden] to what is added to them."""
        return self.adapted(normed, None, None)

    def adapted(self, normed: Tensor, gate_up: Delta | None, down: Delta | None) -> Tensor:
        """As a call, with what adapters add to both products."""
        out = project(self.down, self.activation(project(self.gate_up, normed, gate_up)), down)
        return out if self.output_norm is None else self.output_norm(out)


class Choice(NamedTuple):
    """Experts of each token, best first."""

    experts: Tensor
    """[T, k] int64"""
    weights: Tensor
    """[T, k]"""


class Tokenwise(Protocol):
    """A block in which tokens do not meet: `FeedForward`, or a mixture of experts."""

    @property
    def norm(self) -> Norm:
        """To be applied before the block."""
        ...

    def __call__(self, normed: Tensor) -> Tensor:
        """Normalized hidden states [T, hidden] to what is added to them."""
        ...


def gate_first(outputs: int, device: torch.device) -> Tensor:
    """Indices of outputs of gate and up that alternate: those of gate, then those of up."""
    return torch.arange(outputs, device=device).view(-1, 2).t().flatten()


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """Chooses experts. Shapes use  T = tokens, E = experts, k = experts per token."""

    weight: Projection
    """[T, hidden] to [T, E]; of float32 if `float32`."""
    experts_per_token: int
    normalize: bool
    scoring: Scoring = Scoring.SOFTMAX
    bias: Tensor | None = None
    """float32 [E], added to the scores that experts are chosen by."""
    groups: int = 1
    """Experts are chosen from the best `kept_groups` of so many groups, ordered by the sum of their best ones."""
    kept_groups: int = 1
    group_top: int = 2
    """So many of them."""
    least_sum: float = 0.0
    """Bound from below of what weights are divided by."""
    scale: float = 1.0
    """Factor of the weights."""
    float32: bool = False
    by_logits: bool = False
    """Whether experts are chosen by their logits, which may differ where scores are rounded to 1."""

    def __call__(self, normed: Tensor) -> Choice:
        """[T, hidden] to each token's experts, with weights in the dtype of `normed`."""
        logits = self.weight(normed.float() if self.float32 else normed).float()
        scores = logits.sigmoid() if self.scoring is Scoring.SIGMOID else logits.softmax(dim=-1)
        ranked = logits if self.by_logits else scores if self.bias is None else scores + self.bias
        if self.groups > 1:
            ranked = self._in_best_groups(ranked)
        weights, experts = ranked.topk(self.experts_per_token, dim=-1)
        if ranked is not scores:
            weights = scores.gather(1, experts)
        if self.normalize:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total.clamp_min(self.least_sum) if self.least_sum else total)
        if self.scale != 1.0:
            weights = weights * self.scale
        return Choice(experts, weights.to(normed.dtype))

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        """[T, E] with -inf for the experts of all other groups."""
        tokens, count = ranked.shape
        grouped = ranked.view(tokens, self.groups, count // self.groups)
        best = grouped.topk(self.group_top, dim=-1).values.sum(dim=-1).topk(self.kept_groups, dim=-1).indices
        dropped = torch.ones((tokens, self.groups), dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
        return grouped.masked_fill(dropped[..., None], float("-inf")).view(tokens, count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    """Or this rank's share of it."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlock:
    """The feed-forward block of all tokens beside the chosen experts, or this rank's share of it."""

    gate_up: Projection
    activation: GatedActivation
    down: Projection
    gate: Projection | None
    """[T, hidden] to [T, 1], whose sigmoid multiplies the result."""

    def __call__(self, normed: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks."""
        out = self.down(self.activation(self.gate_up(normed)))
        return out if self.gate is None else out.mul_(self.gate(normed).sigmoid())


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFeedForward:
    """Stands where `FeedForward` stands."""

    norm: Norm
    router: Router
    experts: tuple[Expert, ...]
    activation: GatedActivation
    shared: SharedBlock | None = None
    group: TpGroup = field(default_factory=SingleRank)
    """The ranks, each with a share of every expert's inner dimension. Token by token they choose alike."""
    weighted_inputs: bool = False
    """Whether weights multiply what experts read, in place of their results."""

    def __call__(self, normed: Tensor) -> Tensor:
        """See `FeedForward`."""
        return self.chosen(normed, *self.router(normed))

    def chosen(self, normed: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """What these experts make of the tokens, each [T, k]."""
        chosen = experts.shape[1]
        # A pair's number is token * k + rank, which is also its row in `results`.
        pairs = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self.experts)).tolist()
        hit = [(expert, count) for expert, count in zip(self.experts, counts, strict=True) if count]
        inputs = normed.index_select(0, pairs // chosen)
        if self.weighted_inputs:
            inputs.mul_(weights.flatten().index_select(0, pairs)[:, None])
        groups = torch.split(inputs, [count for _, count in hit])
        outputs = [
            expert.down(self.activation(expert.gate_up(group))) for (expert, _), group in zip(hit, groups, strict=True)
        ]
        grouped = torch.cat(outputs) if outputs else normed  # without tokens that is as empty
        results = torch.empty_like(grouped).index_copy_(0, pairs, grouped).view(-1, chosen, normed.shape[1])
        total = (results if self.weighted_inputs else results * weights[..., None]).sum(dim=1)
        return self.group.all_reduce(total if self.shared is None else total.add_(self.shared(normed)))
