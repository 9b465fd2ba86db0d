"""The interface between executor, model and attention backends.

A backend is built for one pool and one `AttentionSpec` per layer. One step
    1. `plan(batch)` turns a `ForwardBatch` into what all layers share: which tokens see which pages
    2. the model calls the plan once per layer with that layer's q, k and v
    3. the plan writes k and v to the pool, then attends over everything the pool holds for each sequence

On a device a plan is a `TurningPlan`: it takes q and k as their projection left them, and one kernel normalizes and
rotates them on their way to their destination.

`AttentionSpec` is what one layer computes: softmax(cap(q·Kᵀ · scale)) · V over the newest `window` tokens, or those of
the token's chunk, where cap(s) = soft_cap · tanh(s / soft_cap). With sinks the softmax has one more score for each
query head, which is a number of the layer and belongs to no token: it takes its share of the weights and adds nothing.

Contract of every backend
    - A sequence's result depends on its own tokens alone, to the bit: never on other sequences of the batch or on the
      number of threads.
    - Only pages named in the batch's `page_table` are read and only slots in `out_cache_loc` written.
    - The batch is a snapshot, so nothing shared with the scheduler is read after `plan` returned, and the
      scheduler needs no fence against the layers [no-stream-fence].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.prompt_shape import PromptShape
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.kernels.span import Span


class Attend(Protocol):
    """Attention of one step, planned by a backend from its `ForwardBatch`. Called once per layer, in order."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v at `out_cache_loc`, then compute causal attention as the layer's `AttentionSpec` defines it.

        q is [T, heads, head_dim] and k is [T, kv_heads, head_dim], both rotated; v is [T, kv_heads, head_dim]. All
        are views in the model's dtype: the last two dimensions are dense, but tokens may lie further apart than
        heads * head_dim. They are the callee's until it returns; the model does not read them again. Query head h
        reads K/V head h // (heads // kv_heads). Where a layer stores a latent, k is that, and v its beginning,
        [T, kv_heads, value_width].

        Returns [T, heads * head_dim], or of v's width, in q's dtype.
        """
        ...


class TurningPlan(ABC):
    """An `Attend` that turns heads itself. A class and no protocol, because every layer checks for it."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.__call__`."""

    @abstractmethod
    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """As `__call__`, of q and k that have yet to be normalized and rotated by `turn`."""


class GraphPlan(Attend, Protocol):
    """Attention of decodes whose inputs have a place of their own, so that a graph can run it for any of them.

    As made it is a step of padding alone: each row has one token, in the dummy page, and writes there [finite-padding]
    [dummy-page].
    """

    @property
    def page_table(self) -> Tensor:
        """[rows, max_pages] int32"""
        ...

    @property
    def seq_lens(self) -> Tensor:
        """[rows] int32"""
        ...

    @property
    def slots(self) -> Tensor:
        """[rows] int64, `out_cache_loc`"""
        ...

    def load(self, batch: ForwardBatch) -> None:
        """Copy in a step of as many sequences as rows, one token each, on the device. Nothing of an earlier step
        remains that any row would read.
        """
        ...

    def prepare(self) -> None:
        """Compute what all layers share from what is loaded. A part of what is captured, before the layers."""
        ...


class PromptGraphPlan(GraphPlan, Protocol):
    """The same of steps with prompts, which are padded to a shape (`forward.prompt_shape`).

    Sequences may have several tokens. As made it is a step of padding alone: its last sequence has all tokens, and no
    other has any. That sequence has the dummy page alone, whatever is loaded.
    """

    @property
    def extend_lens(self) -> Tensor:
        """[rows] int32"""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NotifyingPlan:
    """A plan, and word of each layer once its K and V are stored; implements `Attend`."""

    plan: Attend
    wrote: Callable[[int], object]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the plan does."""
        gathered = self.plan(layer, q, k, v)
        self.wrote(layer)
        return gathered


class AttentionBackend(Protocol):
    """Attention over one `KvPool`. Called by the thread that runs forwards."""

    def plan(self, batch: ForwardBatch) -> Attend:
        """Prepare one step. Cheap compared with a layer; the plan is used for this step only."""
        ...

    def warm_up(self) -> None:
        """Compile or load what `plan` will need, so that no request waits for it. Touches no page."""
        ...


class GraphBackend(AttentionBackend, Protocol):
    """A backend for devices that run steps by graphs."""

    @property
    def captures_prompts(self) -> bool:
        """Whether a graph of prompts costs about what the step costs without one."""
        ...

    def graph_plan(self, max_rows: int, max_pages: int) -> GraphPlan:
        """A plan for decodes of `max_rows` sequences, each of at most `max_pages` pages."""
        ...

    def prompt_graph_plan(self, shape: PromptShape, max_pages: int) -> PromptGraphPlan:
        """A plan for steps padded to `shape`, whose sequences have at most `max_pages` pages each."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One layer. Equal specs are equal work, so a backend plans a step once per distinct spec.

    Sinks are not compared: a backend reads them from the spec of the layer itself.
    """

    scale: float
    """Factor of the scores, usually 1 / √head_dim."""
    window: int | None = None
    """Newest tokens that a token sees, itself included; None is all of them."""
    chunk: int | None = None
    """Sequences are cut into chunks of so many tokens, and a token sees no other chunk than its own (Llama 4)."""
    soft_cap: float | None = None
    """Bound that scores approach smoothly (Gemma 2); None leaves them alone."""
    value_width: int | None = None
    """Where a layer stores one latent in place of K and V: V is so many numbers at the beginning of K."""
    sinks: Tensor | None = field(default=None, compare=False)
    """float32 [query heads], dense: a score of each head that no cap applies to (gpt-oss); None is no sink."""

    @property
    def span(self) -> Span | None:
        """The window or the chunk; None where a token sees all before it."""
        if self.chunk is not None:
            return Span(self.chunk, chunked=True)
        return None if self.window is None else Span(self.window)

    def first_seen(self, position: int) -> int:
        """The oldest position that the token at `position` sees."""
        return 0 if self.span is None else self.span.first_seen(position)


def distinct(specs: Sequence[AttentionSpec]) -> tuple[tuple[AttentionSpec, ...], tuple[int, ...]]:
    """The different ones among the layers' specs, and for each layer the index of its own."""
    kinds = tuple(dict.fromkeys(specs))
    return kinds, tuple(kinds.index(spec) for spec in specs)
