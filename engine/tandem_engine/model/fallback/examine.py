"""Does this model's attention, all of it, go through the interface? Asked once, before anybody depends on it.

    1. two short prompts run as the engine would run them: packed into one step, then cut into two, with keys and
       values kept by us. Every layer must call the interface exactly once and in order; its options become its
       `AttentionSpec`
    2. the logits must be those that transformers computes for each prompt alone. A model that lets tokens meet
       anywhere else (a convolution, a state, a bias on the scores) fails here, whatever its config.json says

Weights are the real ones, so the examination costs a few forwards of some ten tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.attention.torch_ref import attend_dense
from tandem_engine.errors import CheckpointError
from tandem_engine.model.fallback.head import Head
from tandem_engine.model.fallback.interface import ATTEND, NAME, OBSERVE, Call

PROMPT_LENGTHS = (9, 6)
CUTS = (5, 2)
"""Tokens of each prompt in the first of two steps."""
MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Largest norm of the difference, relative to that of the logits. A wrong model is off by about 1."""

PLAIN_OPTIONS = frozenset({"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids"})
"""Options of the interface that are understood. Others must be absent or None."""
IGNORED_OPTIONS = frozenset({"use_cache", "cache_position", "output_attentions", "output_hidden_states"})
"""What a model was called with and passes on to everybody."""


class Heads(NamedTuple):
    """Shape of a layer's keys and queries."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What the layers told."""

    specs: tuple[AttentionSpec, ...]
    heads: Heads
    hidden_size: int
    vocab_size: int


@dataclass(kw_only=True, slots=True)
class Examination:
    """An `Attend` over prompts of its own that writes down what it is asked."""

    specs: list[AttentionSpec] = field(default_factory=list)
    heads: list[Heads] = field(default_factory=list)
    extend_lens: Sequence[int] = ()
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    first_step: bool = True

    def observe(self, call: Call) -> None:
        """See `Observe`. Raises `CheckpointError` for an option that is not understood."""
        if self.first_step:
            self.specs.append(_spec(call, expected_layer=len(self.specs)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        if k.shape != v.shape:
            raise CheckpointError(
                f"layer {layer} has keys of {k.shape[-1]} and values of {v.shape[-1]} dimensions; "
                "pages hold keys and values of one size"
            )
        if self.first_step:
            self.heads.append(Heads(queries=q.shape[1], keys=k.shape[1], size=q.shape[2]))
        parts = zip(*(rows.split_with_sizes(list(self.extend_lens)) for rows in (q, k, v)), strict=True)
        return torch.cat([self._attend(layer, sequence, *part) for sequence, part in enumerate(parts)]).flatten(1)

    def _attend(self, layer: int, sequence: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = (layer, sequence)
        if place in self.keys:
            k, v = torch.cat((self.keys[place], k)), torch.cat((self.values[place], v))
        self.keys[place], self.values[place] = k, v
        prefix_len = len(k) - len(q)
        return attend_dense(q.float(), k.float(), v.float(), prefix_len, self.specs[layer]).to(q.dtype)


@torch.inference_mode()
def examine(body: PreTrainedModel, head: Head, *, num_layers: int, vocab_size: int) -> Examined:
    """Run the model `body` with its `head` both ways and compare.

    Raises:
        CheckpointError: attention is not, or not only, what goes through the interface.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab_size, (length,), generator=generator) for length in PROMPT_LENGTHS]
    examination = Examination()
    hidden = _packed(body, examination, prompts)
    specs, heads = tuple(examination.specs), set(examination.heads)
    if len(specs) != num_layers:
        raise CheckpointError(
            f"a model of {num_layers} layers calls transformers' attention interface {len(specs)} times; every layer "
            "must call it once, for whatever else layers keep of earlier tokens is not in our pages"
        )
    if len(heads) != 1:
        raise CheckpointError(f"layers differ in their heads ({sorted(heads)}); pages hold layers of one shape")
    ours = head(torch.cat(hidden))
    _require_equal(ours, torch.cat([head(_alone(body, prompt)) for prompt in prompts]), dtype=hidden[0].dtype)
    return Examined(specs=specs, heads=heads.pop(), hidden_size=hidden[0].shape[-1], vocab_size=ours.shape[-1])


def _packed(body: PreTrainedModel, examination: Examination, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states of each prompt, computed in two steps of both prompts."""
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    starts = (0,) * len(prompts)
    for stops in (CUTS, PROMPT_LENGTHS):
        parts = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        examination.extend_lens = [part.stop - part.start for part in parts]
        ids = torch.cat([prompt[part] for prompt, part in zip(prompts, parts, strict=True)])
        positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        out = _run(body, ids, positions, **{ATTEND: examination, OBSERVE: examination.observe})
        for collected, rows in zip(hidden, out.split_with_sizes(list(examination.extend_lens)), strict=True):
            collected.append(rows)
        starts, examination.first_step = stops, False
    return [torch.cat(rows) for rows in hidden]


def _alone(body: PreTrainedModel, prompt: Tensor) -> Tensor:
    """Hidden states as transformers computes them without us."""
    with _eager(body):
        return _run(body, prompt, torch.arange(len(prompt)))


def _run(body: PreTrainedModel, ids: Tensor, positions: Tensor, **options: object) -> Tensor:
    out = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, **options)
    states: Tensor = out.last_hidden_state[0]
    return states


@contextlib.contextmanager
def _eager(body: PreTrainedModel) -> Iterator[None]:
    body.set_attn_implementation("eager")
    try:
        yield
    finally:
        body.set_attn_implementation(NAME)


def _spec(call: Call, *, expected_layer: int) -> AttentionSpec:
    options = {name: value for name, value in call.options.items() if value is not None}
    layer = call.module.layer_idx
    if layer != expected_layer:
        raise CheckpointError(f"attention of layer {layer} runs as number {expected_layer}; layers must run in order")
    unknown = sorted(options.keys() - PLAIN_OPTIONS - IGNORED_OPTIONS)
    if unknown:
        raise CheckpointError(f"attention of layer {layer} asks for {', '.join(unknown)}, which is not supported")
    if call.mask is not None:
        raise CheckpointError(f"layer {layer} brings an attention mask of its own, which is not supported")
    if not options.get("is_causal", True) or not getattr(call.module, "is_causal", True):
        raise CheckpointError(f"layer {layer} is not causal; tokens of a generating model see no later ones")
    return AttentionSpec(
        scale=float(options.get("scaling", call.head_dim**-0.5)),
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
    )


def _require_equal(ours: Tensor, theirs: Tensor, *, dtype: torch.dtype) -> None:
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= MAX_ERROR[dtype]:
        raise CheckpointError(
            f"through its attention interface transformers computes other logits than by itself (relative error "
            f"{error:.2g}): the model does something between tokens that the interface does not see"
        )
