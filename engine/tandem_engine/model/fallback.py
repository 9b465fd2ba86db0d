"""A model of transformers with Tandem's paged attention; implements `CausalLM`.

    load      weights by transformers, from safetensors alone; nothing missing, nothing left over
    split     layers and head apart, because hidden states and logits are computed separately
    examine   attention goes through the interface, and only through it
    run       all tokens of a step as one flat sequence, each with its own position

transformers looks a layer's attention up by name and passes it q, k and v, and every keyword that the model is called
with. The `Attend` of a step is such a keyword, and `paged_attention`, registered once per process, has no state:

    model(input_ids, position_ids, tandem_attend=attend) ─▶ layer ─▶ paged_attention(module, q, k, v, …,
                                                                      tandem_attend=attend)

transformers builds no masks for a name that its mask interface does not know: the `Attend` defines what a token may
see.

Models scale, cap or shift their logits in the function that also runs the layers. That function is kept, and the layers
in it are replaced by a module that returns given hidden states.

Before a model serves, an examination compares it with the model that transformers computes:
    1. prompts run as the engine would run them: packed into one step, then cut into two, with KV in pages. Every layer
       must call the interface exactly once and in order; its options become its `AttentionSpec`
    2. the logits must be those of the whole model, which transformers computes from the tokens of each prompt alone,
       without positions or masks. A model that counts positions differently (RoBERTa), or lets tokens interact
       elsewhere (a convolution, a state, a bias on the scores), fails here, whatever its config.json states
    3. the same with prompts longer than every window and threshold of config.json, as far as `WORK` allows, and with
       larger windows made shorter

It uses the real weights and costs a few forwards of some ten tokens, and a few hundred where a threshold is in reach.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import logging

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import attend_dense
from tandem_engine.model.base import Attend
from tandem_engine.model.checkpoint_folder import ModelDirectory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.fallback_angles import set_long_angles
from tandem_engine.model.fallback_config import load_config, refused_by_transformers
from tandem_engine.model.long_context import has_long_angles

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


@dataclass
class LayersOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """Has every field that some model looks for after its layers."""

    cross_attentions: tuple[Tensor, ...] | None = None


class GivesBack(nn.Module):
    """Stands for the layers: embeddings in, the same out as hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> LayersOutput:
        return LayersOutput(last_hidden_state=inputs_embeds)


class Head:
    """The rest of a causal language model without its layers."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model = model
        self._name = name
        """Of the layers within the model."""

    @classmethod
    def split(cls, model: PreTrainedModel) -> tuple[PreTrainedModel, "Head"]:
        """Take `model` apart into its layers and its head. `model` itself is used up.

        Raises:
            CheckpointError: it has no layers that can be taken out.
        """
        body = model.get_decoder()
        name = next((name for name, module in model.named_modules() if module is body), "")
        if not name:
            raise CheckpointError(f"{type(model).__name__} has no decoder apart from its output head")
        model.set_submodule(name, GivesBack())
        return body, cls(model, name)

    @contextlib.contextmanager
    def whole(self, body: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """The model as transformers built it, with its layers `body` and attention of its own."""
        self._model.set_submodule(self._name, body)
        self._model.set_attn_implementation("eager")
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(NAME)
            self._model.set_submodule(self._name, GivesBack())

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to float32 logits [N, vocab]."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(torch.float32)


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
def examine(body: PreTrainedModel, head: Head, *, num_layers: int, vocab_size: int, max_position: int) -> Examined:
    """Run the model `body` with its `head` both ways and compare.

    Args:
        max_position: positions that will be used at most.

    Raises:
        CheckpointError: attention is not, or not only, what goes through the interface.
    """
    prompts = _prompts(body.config, [min(length, max_position) for length in PROMPT_LENGTHS], vocab_size)
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
    ours = [head(rows) for rows in hidden]
    _require_equal(ours, _alone(body, head, prompts), dtype=body.dtype)
    reach = min(LONGEST, max_position, int(WORK.get(body.device.type, WORK["cpu"]) / max(1, body.num_parameters())))
    lengths = [threshold + BEYOND for threshold in _thresholds(body.config) if threshold < reach]
    if any(length > min(map(len, prompts)) for length in lengths):
        _compare(body, head, _prompts(body.config, [min(max(lengths), max_position), CUTS[0]], vocab_size))
    with _short_windows(body, reach) as shortened:
        if shortened:
            _compare(body, head, prompts)
    return Examined(specs=specs, heads=heads.pop(), hidden_size=hidden[0].shape[-1], vocab_size=ours[0].shape[-1])


def _compare(body: PreTrainedModel, head: Head, prompts: Sequence[Tensor]) -> None:
    ours = [head(rows) for rows in _packed(body, Examination(), prompts)]
    _require_equal(ours, _alone(body, head, prompts), dtype=body.dtype)


def _prompts(config: PreTrainedConfig, lengths: Sequence[int], vocab_size: int) -> list[Tensor]:
    """Random tokens; the second half of each prompt begins with those that a model may treat in a way of its own."""
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


def _packed(body: PreTrainedModel, examination: Examination, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states of each prompt, computed in two steps of all prompts."""
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    cuts = [min(cut, len(prompt) - 1) for cut, prompt in zip(CUTS, prompts, strict=True)]
    for stops in (cuts, [len(prompt) for prompt in prompts]):
        parts = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        examination.extend_lens = [part.stop - part.start for part in parts]
        ids = torch.cat([prompt[part] for prompt, part in zip(prompts, parts, strict=True)])
        positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        options = {ATTEND: examination, OBSERVE: examination.observe}
        ids, positions = ids.to(body.device), positions.to(body.device)
        out = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, **options)
        for collected, rows in zip(hidden, out.last_hidden_state[0].split(list(examination.extend_lens)), strict=True):
            collected.append(rows)
        starts, examination.first_step = stops, False
    return [torch.cat(rows) for rows in hidden]


def _alone(body: PreTrainedModel, head: Head, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Logits as transformers computes them without us, told nothing but the tokens."""
    with head.whole(body) as model:
        return [
            model(input_ids=prompt[None].to(body.device), use_cache=False).logits[0].to(torch.float32)
            for prompt in prompts
        ]


def _spec(call: Call, *, expected_layer: int) -> AttentionSpec:
    options = {name: value for name, value in call.options.items() if value is not None}
    layer = call.module.layer_idx
    if layer != expected_layer:
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


def _require_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, dtype: torch.dtype) -> None:
    """Compare each prompt, and the end of it, where windows and thresholds show."""
    for mine, reference in zip(ours, theirs, strict=True):
        for rows in (slice(None), slice(-BEYOND // 2, None)):
            error = float((mine[rows] - reference[rows]).norm() / reference[rows].norm())
            if not error <= MAX_ERROR[dtype]:
                raise CheckpointError(
                    f"with its attention over pages the model computes other logits than transformers by itself "
                    f"(relative error {error:.2g} in a prompt of {len(mine)} tokens): it does something between tokens "
                    "or with positions that the attention interface does not see"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackModel:
    """Layers and head of a model of transformers."""

    config: ModelConfig
    attention: tuple[AttentionSpec, ...]
    body: PreTrainedModel
    head: Head

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        assert adapters is None, "no adapter is loaded for a model that transformers computes"
        out = self.body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **{ATTEND: attend})
        hidden: Tensor = out.last_hidden_state[0]
        return hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.head(hidden)


def load_fallback(
    directory: ModelDirectory,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context_length: int,
    progress: bool,
) -> FallbackModel:
    """Load the weights in `directory` and examine the model. `config` is corrected by what is found.

    Args:
        context_length: positions that will be used at most.

    Raises:
        CheckpointError: weights do not fit the model, or it cannot be served through the attention interface.
    """
    register()
    hf_config = load_config(directory, read_fields(directory))
    model = _load(directory, hf_config, dtype, progress=progress).to(device).eval()
    with refused_by_transformers(f"{hf_config.model_type} cannot run with attention of ours"):
        body, head = Head.split(model)
        found = examine(
            body,
            head,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            max_position=min(context_length, config.rope.original_max_position or context_length),
        )
        if has_long_angles(config, context_length):
            set_long_angles(body, hf_config)
    _require_told_window(hf_config, found.specs)
    facts = replace(
        config,
        num_heads=found.heads.queries,
        num_kv_heads=found.heads.keys,
        head_dim=found.heads.size,
        hidden_size=found.hidden_size,
        vocab_size=found.vocab_size,
        windows=tuple(spec.window for spec in found.specs),
    )
    return FallbackModel(config=facts, attention=found.specs, body=body, head=head)


def _load(
    directory: ModelDirectory, hf_config: PreTrainedConfig, dtype: torch.dtype, *, progress: bool
) -> PreTrainedModel:
    if not progress:
        logging.disable_progress_bar()
    with refused_by_transformers(f"transformers cannot load {directory.path}"):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory.path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report[problem]))
        if names:
            raise CheckpointError(f"the weights in {directory.path} have {problem.replace('_', ' ')}: {names[0]}")
    return model


def _require_told_window(hf_config: PreTrainedConfig, specs: tuple[AttentionSpec, ...]) -> None:
    """A window that only masks would apply, which we do not build, must not go unnoticed."""
    window = getattr(hf_config, "sliding_window", None)
    if not window or getattr(hf_config, "use_sliding_window", True) is False:
        return
    if all(spec.window is None for spec in specs):
        raise CheckpointError(
            f"sliding_window is {window}, but no layer passes it to the attention interface; "
            "remove it from config.json if the model has no window"
        )
