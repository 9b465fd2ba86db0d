"""A model of transformers is compared with itself before it serves.

    1. prompts run as the engine would run them: packed into one step, then cut into two, with KV in pages. Every layer
       must call the interface exactly once and in order; its options become its `AttentionSpec`. With states
       (`fallback_states`) some layers call it, each once, and the last token of each prompt is a step of its own
    2. the logits must be those of the whole model, which transformers computes from the tokens of each prompt alone,
       without positions or masks. A model that counts positions differently (RoBERTa), or lets tokens interact
       elsewhere (a bias on the scores), fails here, whatever its config.json states
    3. the same with prompts longer than every window and threshold of config.json, as far as `WORK` allows, and with
       larger windows made shorter

It uses the real weights and costs a few forwards of some ten tokens, and a few hundred where a threshold is in reach.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tandem_engine.base.errors import CheckpointError
from tandem_engine.memory.state_pool import Run, StatePool, StepStates
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import attend_dense
from tandem_engine.model.fallback_interface import ATTEND, OBSERVE, Call, Head
from tandem_engine.model.fallback_states import InOrder, Mixers

PROMPT_LENGTHS = (29, 18)

CUTS = (17, 5)
"""Tokens of each prompt in the first of two steps."""

BEYOND = 12
"""Tokens of a prompt after a threshold."""

SHORT_WINDOW = 7

LONGEST = 1100
"""Tokens of a prompt at most: transformers' own attention writes down all scores."""

WORK = {"cpu": 2e12, "cuda": 1e14}
"""Parameters times tokens of a long prompt, at most: some ten seconds."""

THRESHOLD = re.compile(r"window|chunk|original_max_position|floor_scale|local_attention")
"""Names of fields whose number is a length from which on a model does something else."""

MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Largest norm of the difference, relative to that of the logits. A wrong model is off by about 1."""

PLAIN_OPTIONS = frozenset({"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids"})
"""Options of the interface that are understood. Others must be absent or None."""

IGNORED_OPTIONS = frozenset({"use_cache", "cache_position", "output_attentions", "output_hidden_states"})
"""What a model was called with and passes on to all layers."""


class Heads(NamedTuple):
    """Shape of a layer's keys and queries."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What the layers reported."""

    specs: tuple[AttentionSpec, ...]
    heads: Heads
    hidden_size: int
    vocab_size: int


@dataclass(kw_only=True, slots=True)
class Examination:
    """An `Attend` over its own prompts that records its calls."""

    specs: list[AttentionSpec] = field(default_factory=list)
    heads: list[Heads] = field(default_factory=list)
    extend_lens: Sequence[int] = ()
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    first_step: bool = True
    in_order: bool = False
    """Whether layers are counted by their calls."""

    def observe(self, call: Call) -> None:
        """See `Observe`. Raises `CheckpointError` for an option that is not understood."""
        if self.first_step:
            self.specs.append(_spec(call, expected_layer=None if self.in_order else len(self.specs)))

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
def examine(
    body: PreTrainedModel,
    head: Head,
    *,
    num_layers: int,
    vocab_size: int,
    max_position: int,
    mixers: Mixers | None = None,
) -> Examined:
    """Run the model `body` with its `head` both ways and compare.

    Args:
        max_position: positions that will be used at most.
        mixers: of layers that keep states.

    Raises:
        CheckpointError: attention is not, or not only, what goes through the interface.
    """
    prompts = _prompts(body.config, [min(length, max_position) for length in PROMPT_LENGTHS], vocab_size)
    examination = Examination(in_order=mixers is not None)
    hidden = _packed(body, examination, prompts, mixers)
    specs, heads = tuple(examination.specs), set(examination.heads)
    if mixers is not None and not specs:
        raise CheckpointError(
            f"a model of {num_layers} layers calls transformers' attention interface 0 times; where layers keep "
            "states, others must call it: a model without keys and values is not supported"
        )
    if mixers is None and len(specs) != num_layers:
        raise CheckpointError(
            f"a model of {num_layers} layers calls transformers' attention interface {len(specs)} times; every layer "
            "must call it once, for whatever else layers keep of earlier tokens is not in our pages"
        )
    if len(heads) != 1:
        raise CheckpointError(f"layers differ in their heads ({sorted(heads)}); pages hold layers of one shape")
    ours, theirs = [head(rows) for rows in hidden], _alone(body, head, prompts)
    if mixers is not None and not _are_equal(ours, theirs, dtype=body.dtype):
        mixers.stepwise[0] = True
        ours = [head(rows) for rows in _packed(body, Examination(in_order=True), prompts, mixers)]
    _require_equal(ours, theirs, dtype=body.dtype)
    reach = min(LONGEST, max_position, int(WORK.get(body.device.type, WORK["cpu"]) / max(1, body.num_parameters())))
    lengths = [threshold + BEYOND for threshold in _thresholds(body.config) if threshold < reach]
    if any(length > min(map(len, prompts)) for length in lengths):
        longest = _prompts(body.config, [min(max(lengths), max_position), CUTS[0]], vocab_size)
        _compare(body, head, longest, mixers)
    with _short_windows(body, reach) as shortened:
        if shortened:
            _compare(body, head, prompts, mixers)
    return Examined(specs=specs, heads=heads.pop(), hidden_size=hidden[0].shape[-1], vocab_size=ours[0].shape[-1])


def _compare(body: PreTrainedModel, head: Head, prompts: Sequence[Tensor], mixers: Mixers | None) -> None:
    examination = Examination(in_order=mixers is not None)
    ours = [head(rows) for rows in _packed(body, examination, prompts, mixers)]
    _require_equal(ours, _alone(body, head, prompts), dtype=body.dtype)


def _prompts(config: PreTrainedConfig, lengths: Sequence[int], vocab_size: int) -> list[Tensor]:
    """Random tokens; the second half of each prompt begins with those that a model may treat specially."""
    generator = torch.Generator().manual_seed(0)
    named = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    special = [token for token in named if type(token) is int and 0 <= token < vocab_size]
    prompts = [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]
    for prompt in prompts:
        half = len(prompt) // 2
        count = min(len(special), len(prompt) - half)
        prompt[half : half + count] = torch.tensor(special[:count], dtype=torch.int64)
    return prompts


def _thresholds(config: PreTrainedConfig) -> list[int]:
    """Lengths that config.json names, in any depth."""
    found: list[int] = []
    left: list[tuple[str, object]] = list(config.to_dict().items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left.extend((str(inner), deeper) for inner, deeper in value.items())
        elif type(value) is int and value > 0 and THRESHOLD.search(name):
            found.append(value)
    return found


@contextlib.contextmanager
def _short_windows(body: PreTrainedModel, reach: int) -> Iterator[bool]:
    """A window that is out of reach becomes `SHORT_WINDOW`, wherever the model keeps it. Yields if there is one."""
    window = getattr(body.config, "sliding_window", None)
    if type(window) is not int or window + BEYOND <= reach:
        yield False
        return
    owners = [body.config, *(module for module in body.modules() if getattr(module, "sliding_window", None) == window)]
    for owner in owners:
        owner.sliding_window = SHORT_WINDOW
    try:
        yield True
    finally:
        for owner in owners:
            owner.sliding_window = window


def _packed(
    body: PreTrainedModel, examination: Examination, prompts: Sequence[Tensor], mixers: Mixers | None
) -> list[Tensor]:
    """Hidden states of each prompt, computed in two steps of all prompts; with states in a third of one token each."""
    pool = None if mixers is None else mixers.pool(len(prompts), body.device)
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    cuts = [min(cut, len(prompt) - 1) for cut, prompt in zip(CUTS, prompts, strict=True)]
    before_last = [] if mixers is None else [[max(len(p) - 1, cut) for p, cut in zip(prompts, cuts, strict=True)]]
    for stops in (cuts, *before_last, [len(prompt) for prompt in prompts]):
        parts = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        examination.extend_lens = [part.stop - part.start for part in parts]
        ids = torch.cat([prompt[part] for prompt, part in zip(prompts, parts, strict=True)])
        positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        options: dict[str, object] = {ATTEND: examination, OBSERVE: examination.observe, "use_cache": False}
        if mixers is not None and pool is not None:
            states = _states(pool, parts)
            options |= {ATTEND: InOrder(attend=examination), "use_cache": True, **mixers.cache(states)}
        ids, positions = ids.to(body.device), positions.to(body.device)
        out = body(input_ids=ids[None], position_ids=positions[None], **options)
        for collected, rows in zip(hidden, out.last_hidden_state[0].split(list(examination.extend_lens)), strict=True):
            collected.append(rows)
        starts, examination.first_step = stops, False
    return [torch.cat(rows) for rows in hidden]


def _states(pool: StatePool, parts: Sequence[slice]) -> StepStates:
    """Of a step that computes `parts` of the prompts."""
    rows = torch.arange(1, 1 + len(parts), device=pool.bytes_view().device)
    lengths = [part.stop - part.start for part in parts]
    if all(length == 1 and part.start for length, part in zip(lengths, parts, strict=True)):
        return StepStates(pool=pool, runs=(), decodes=rows, fresh=None, first_decode=0)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    runs = tuple(
        Run(start, start + length, 1 + row, fresh=part.start == 0)
        for row, (start, length, part) in enumerate(zip(starts, lengths, parts, strict=True))
        if length
    )
    return StepStates(pool=pool, runs=runs, decodes=None, fresh=None, first_decode=sum(lengths))


def _alone(body: PreTrainedModel, head: Head, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Logits as transformers computes them without us, from the tokens alone."""
    with head.whole(body) as model:
        return [
            model(input_ids=prompt[None].to(body.device), use_cache=False).logits[0].to(torch.float32)
            for prompt in prompts
        ]


def _spec(call: Call, *, expected_layer: int | None) -> AttentionSpec:
    options = {name: value for name, value in call.options.items() if value is not None}
    layer = call.module.layer_idx
    if expected_layer is not None and layer != expected_layer:
        raise CheckpointError(f"attention of layer {layer} runs as number {expected_layer}; layers must run in order")
    unknown = sorted(options.keys() - PLAIN_OPTIONS - IGNORED_OPTIONS)
    if unknown:
        raise CheckpointError(f"attention of layer {layer} requires {', '.join(unknown)}, which is not supported")
    if call.mask is not None:
        raise CheckpointError(f"layer {layer} uses a custom attention mask, which is not supported")
    if not options.get("is_causal", True) or not getattr(call.module, "is_causal", True):
        raise CheckpointError(f"layer {layer} is not causal; tokens of a generating model see no later ones")
    return AttentionSpec(
        scale=float(options.get("scaling", call.head_dim**-0.5)),
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
    )


def _are_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, dtype: torch.dtype) -> bool:
    return all(error <= MAX_ERROR[dtype] for error, _ in _errors(ours, theirs))


def _errors(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[float, int]]:
    """Of each prompt, and of the end of it, where windows and thresholds show; and its length."""
    for mine, reference in zip(ours, theirs, strict=True):
        for rows in (slice(None), slice(-BEYOND // 2, None)):
            yield float((mine[rows] - reference[rows]).norm() / reference[rows].norm()), len(mine)


def _require_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, dtype: torch.dtype) -> None:
    for error, length in _errors(ours, theirs):
        if not error <= MAX_ERROR[dtype]:
            raise CheckpointError(
                f"with its attention over pages the model computes other logits than transformers by itself "
                f"(relative error {error:.2g} in a prompt of {length} tokens): it does something between tokens "
                "or with positions that the attention interface does not see"
            )
