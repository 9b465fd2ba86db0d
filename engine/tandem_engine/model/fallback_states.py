"""States of layers that transformers computes: Mamba, short convolutions, linear attention.

Such a layer keeps what it needs of earlier tokens in a layer of transformers' `Cache`: inputs of a convolution and
states of a recurrence, each of fixed size. Here they lie in a slot of our `StatePool`, so they follow a request
wherever the engine takes it (ADR 0113).

A step is one flat sequence for all other layers. The module that owns such states, its mixer, runs once for each
sequence with several tokens, and once for all that have one:

    mixer(hidden [1, T]) ─▶ for each run      slot ─▶ cache layer, mixer(hidden [1, L]), cache layer ─▶ slot
                            for the decodes   slots ─▶ cache layer, mixer(hidden [N, 1]), cache layer ─▶ slots

The cache layers are those of transformers, so updates are its own code. A run that continues a sequence is passed whole
if the examination finds that to be right, and else token by token.

Which modules are mixers is found by running the model once with a cache that notices where its states are updated.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import StatePart
from tandem_engine.memory.state_pool import PartedSpec, Run, StatePool, StepStates, parted_spec
from tandem_engine.model.attention.backend import Attend
from tandem_engine.model.fallback_config import refused_by_transformers
from tandem_engine.model.fallback_interface import Head

CONV, RECURRENT = "conv_states", "recurrent_states"
"""Attributes of a cache layer: tensors by index, with the sequence first."""


@dataclass(kw_only=True, slots=True)
class InOrder:
    """An `Attend` that counts its calls: layers without attention have no pages."""

    attend: Attend
    calls: int = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - counted here
        """See `Attend`."""
        self.calls += 1
        return self.attend(self.calls - 1, q, k, v)


class StepCache(DynamicCache):  # type: ignore[misc]
    """What a model gets for a cache in a step. Attention over earlier tokens is that of the step's `Attend`."""

    def __init__(self, config: PreTrainedConfig, states: StepStates) -> None:
        super().__init__(config=config)
        self.states = states
        self.parts = [part for run in states.runs for part in run.parts()]
        """transformers' code returns the last state of a run alone, so runs end where states are copied."""
        self.runs = [DynamicCache(config=config) for _ in self.parts]
        self.decodes = DynamicCache(config=config)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002 - of transformers
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """K and V of the step's tokens, as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - of transformers
        """Positions are given."""
        return 0


class NoticingCache(DynamicCache):  # type: ignore[misc]
    """Remembers which module updates the states of which layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.callers: list[nn.Module] = []
        """Modules that are running and were given this cache."""
        self.owners: dict[int, set[nn.Module]] = {}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """As of transformers."""
        self._notice(layer_idx)
        updated: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        return updated

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """As of transformers."""
        self._notice(layer_idx)
        updated: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return updated

    def _notice(self, layer: int) -> None:
        self.owners.setdefault(layer, set()).update(self.callers[-1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixers:
    """The modules of a model that keep states, each of which is replaced in its place."""

    config: PreTrainedConfig
    cache_name: str
    """Of the argument that the model takes a cache by."""
    modules: dict[int, nn.Module]
    """By layer."""
    parts: tuple[StatePart, ...]
    """In the order of the views of a slot."""
    stepwise: list[bool] = field(default_factory=lambda: [False])
    """Whether runs that continue a sequence are passed token by token."""

    def cache(self, states: StepStates) -> dict[str, StepCache]:
        """The argument of a step."""
        return {self.cache_name: StepCache(self.config, states)}

    @property
    def spec(self) -> PartedSpec:
        """Of a slot."""
        return parted_spec(self.parts)

    def pool(self, rows: int, device: torch.device) -> StatePool:
        """For as many sequences, apart from those of an engine; what lies in it is no number."""
        pool = StatePool(self.spec, rows=rows, device=device)
        pool.bytes_view()[1:].fill_(0xFF)
        return pool

    def replace(self) -> None:
        """Have the modules split what they are called with in a step."""
        for layer, module in self.modules.items():
            own = [(index, part) for index, part in enumerate(self.parts) if part.layer == layer]
            split = _Split(forward=module.forward, layer=layer, own=own, stepwise=self.stepwise)
            module.forward = split


@torch.inference_mode()
def find_mixers(body: PreTrainedModel, head: Head, prompt: Tensor) -> Mixers | None:
    """Those of the model `body`, which `prompt` runs through once; None where its cache has no states.

    Raises:
        CheckpointError: the model does not run with such a cache, or several modules share the states of a layer.
    """
    cache = NoticingCache(config=body.config)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return None
    name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    unfit = refused_by_transformers("the model does not run with transformers' cache for its layer_types")
    with head.whole(body) as model, _noticing(body, cache), unfit:
        model(input_ids=prompt[None].to(body.device), use_cache=True, **{name: cache})
    modules = {}
    for layer, owners in cache.owners.items():
        if len(owners) != 1:
            raise CheckpointError(f"{len(owners)} modules share the state of layer {layer}; one must own it")
        modules[layer] = next(iter(owners))
    if not modules:
        return None
    return Mixers(config=body.config, cache_name=name, modules=modules, parts=tuple(_parts(cache, sorted(modules))))


@contextlib.contextmanager
def _noticing(body: PreTrainedModel, cache: NoticingCache) -> Iterator[None]:
    """While modules that are given `cache` are among its callers."""

    def enters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(each is cache for each in (*args, *kwargs.values())):
            cache.callers.append(module)

    def leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
        if any(each is cache for each in (*args, *kwargs.values())):
            left = cache.callers.pop()
            assert left is module, "modules are left in order"

    hooks = [
        hook
        for module in body.modules()
        for hook in (
            module.register_forward_pre_hook(enters, with_kwargs=True),
            module.register_forward_hook(leaves, with_kwargs=True),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _parts(cache: DynamicCache, layers: Sequence[int]) -> Iterator[StatePart]:
    for layer in layers:
        for kind in (CONV, RECURRENT):
            for index, tensor in getattr(cache.layers[layer], kind).items():
                if tensor is not None:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    yield StatePart(layer=layer, kind=kind, index=index, shape=tuple(tensor.shape[1:]), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """Stands for `forward` of a mixer."""

    forward: Callable[..., Any]
    layer: int
    own: list[tuple[int, StatePart]]
    """Its parts, and their numbers among the views of a slot."""
    stepwise: list[bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, StepCache)), None)
        if cache is None:
            return self.forward(*args, **kwargs)
        hidden, args = (kwargs["hidden_states"], args) if "hidden_states" in kwargs else (args[0], args[1:])
        named = {name: each for name, each in kwargs.items() if name != "hidden_states"}
        call = partial(self._called, cache, args, named)
        states = cache.states
        outputs = [
            self._run(states, run, own, call, hidden[:, run.start : run.stop])
            for run, own in zip(cache.parts, cache.runs, strict=True)
        ]
        if states.decodes is not None:
            single = hidden[0, states.first_decode :, None]
            outputs.append(self._decodes(states, states.decodes, cache.decodes, call, single))
        return torch.cat(outputs, dim=1)

    def _called(
        self, step: StepCache, args: tuple[Any, ...], kwargs: dict[str, Any], cache: DynamicCache, hidden: Tensor
    ) -> Tensor:
        """Outputs for `hidden`, [B, L, hidden_size]."""
        given = [cache if each is step else each for each in args]
        named = {name: cache if each is step else each for name, each in kwargs.items()}
        out = self.forward(hidden, *given, **named)
        if not isinstance(out, Tensor):
            raise CheckpointError(f"the module with the state of layer {self.layer} returns more than hidden states")
        return out

    def _run(
        self, states: StepStates, run: Run, cache: DynamicCache, call: Callable[..., Tensor], hidden: Tensor
    ) -> Tensor:
        if not run.fresh:
            self._load(cache, {index: states.pool.views[index][run.row, None].clone() for index, _ in self.own})
        if run.fresh or not self.stepwise[0]:
            out = call(cache, hidden)
        else:
            out = torch.cat([call(cache, each) for each in torch.split(hidden, 1, dim=1)], dim=1)
        kept = [run.row, *(copy.slot for copy in run.snapshots)]
        for index, tensor in self._kept(cache):
            for slot in kept:
                states.pool.views[index][slot].copy_(tensor[0])
        return out

    def _decodes(
        self, states: StepStates, rows: Tensor, cache: DynamicCache, call: Callable[..., Tensor], hidden: Tensor
    ) -> Tensor:
        loaded = {}
        for index, part in self.own:
            tensor = states.pool.views[index].index_select(0, rows)
            if states.fresh is not None:
                # Not by a product: what is left in a slot may be no number.
                tensor.masked_fill_(states.fresh.view(-1, *[1] * len(part.shape)), 0)
            loaded[index] = tensor
        self._load(cache, loaded)
        out = call(cache, hidden)
        for index, tensor in self._kept(cache):
            states.pool.views[index].index_copy_(0, rows, tensor)
        return out.transpose(0, 1)

    def _load(self, cache: DynamicCache, tensors: dict[int, Tensor]) -> None:
        """As a cache is that has seen tokens."""
        layer = cache.layers[self.layer]
        for index, part in self.own:
            tensor = tensors[index]
            getattr(layer, part.kind)[part.index] = tensor
            getattr(layer, f"is_{part.kind}_initialized")[part.index] = True
            layer.has_previous_state[part.index] = True
            if part.kind == CONV:
                layer.dtype, layer.device = tensor.dtype, tensor.device
                layer.conv_kernel_size[part.index] = tensor.shape[-1]

    def _kept(self, cache: DynamicCache) -> Iterator[tuple[int, Tensor]]:
        layer = cache.layers[self.layer]
        for index, part in self.own:
            yield index, getattr(layer, part.kind)[part.index]
