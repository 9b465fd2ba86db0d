"""One adapter after the other, made by PEFT, read by the engine: equal outputs, or a refusal that names the cause.

PEFT adds the adapter to the model of transformers, its matrices get random values, and it is saved and read by the
engine. If the engine accepts the folder, its logits are those of PEFT's model, unmerged and merged. They are computed
in one step with rows of the model alone and of the adapter that was accepted before. With `engine` an engine also
generates tokens for all of them in one batch, by the kernels of decodes, and PEFT's model would choose the same.
"""

import json
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import AdapterConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.forward.adapter_rows import NO_ADAPTER
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.cli.flags import bundled_model
from tandem_testing.adapted_models import load_adapted
from tandem_testing.adapters import ATTENTION, SEVEN, STATES, read_files, write_files
from tandem_testing.lora_draws.fields import MAY_BE_REFUSED, NEEDED, ONLY_SAVED, drawn_fields
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

ATOL = 1e-3
"""Of logits up to 1, and that much of larger ones: random adapters make them large."""

FAMILIES: Mapping[str, Sequence[str]] = {
    "tandem-mini": SEVEN,
    "qwen3": SEVEN,
    "llama-bias": SEVEN,
    "gemma2": SEVEN,
    "olmo2": SEVEN,
    "granite": SEVEN,
    "mixtral": ATTENTION,
    "gpt-oss": ATTENTION,
    "qwen3-next": (*ATTENTION, *STATES["qwen3-next"]),
    "qwen3.5": (*SEVEN, *STATES["qwen3.5"]),
    "qwen3.5-moe": (*ATTENTION, *STATES["qwen3.5-moe"]),
}
"""With the projections that an adapter may have."""

UNSUPPORTED: Mapping[str, str] = {
    "deepseek-v3": "latent attention",
    "gemma4": "layers differ in their heads",
    "phi3": "joins in one matrix",
}
"""Families whose adapters are all refused, with words of the sentence."""

ENGINE_FAMILIES = frozenset({"tandem-mini", "qwen3", "mixtral", "qwen3.5"})
STORED = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What the file of an adapter may have; float64 is refused."""

PROMPT, TOKENS = 7, 5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a draw."""

    refused: str
    """The engine's reason; "" if it has accepted the adapter."""
    difference: float = 0.0
    """Largest of a logit, to PEFT's model, over the largest logit or 1."""


class NothingToCompareError(Exception):
    """PEFT refuses the config, or makes nothing of it."""


class _Accepted(NamedTuple):
    """An adapter, and what PEFT computes with it."""

    folder: Path
    ids: Tensor
    logits: Tensor


@dataclass(kw_only=True, slots=True)
class LoraDraws:
    """Adapters of one checkpoint. `folder`: for what is written."""

    family: str
    folder: Path
    engine: bool = False
    """Accepted adapters also generate."""
    base: Path = field(init=False)
    _number: int = 0
    _before: _Accepted | None = None

    def __post_init__(self) -> None:
        bundled = self.family == "tandem-mini"
        self.base = bundled_model() if bundled else write_tiny_checkpoint(self.family, self.folder / self.family)

    @property
    def modules(self) -> Sequence[str]:
        return FAMILIES.get(self.family, ("qkv_proj",) if self.family == "phi3" else ("o_proj",))

    def draw(self, dice: random.Random) -> Outcome:
        """Raises as `outcome`."""
        fields = drawn_fields(dice, self.modules)
        return self.outcome(fields, dice.randrange(1 << 30), stored=dice.choice(STORED))

    def outcome(self, fields: Mapping[str, Any], seed: int, *, stored: torch.dtype = torch.float32) -> Outcome:
        """With what `fields` need of others.

        Raises `NothingToCompareError`, and `AssertionError` for a wrong output or refusal.
        """
        self._number += 1
        fields = {name: value for each in fields for name, value in NEEDED.get(each, {}).items()} | dict(fields)
        written = self.folder / f"adapter-{self._number}"
        ids = torch.randint(90, (PROMPT,), generator=torch.Generator().manual_seed(seed))
        theirs = self._peft(fields, seed, written, stored)
        try:
            ours = self._ours(written, ids)
        except CheckpointError as error:
            require_named(str(error), fields, stored, UNSUPPORTED.get(self.family))
            return Outcome(refused=str(error))
        assert self.family not in UNSUPPORTED, f"{dict(fields)}: {self.family} is accepted"
        assert stored is not torch.float64, f"{dict(fields)}: float64 is accepted"
        unmerged = theirs.logits(ids)
        expected = [unmerged, theirs.alone(ids), *([] if self._before is None else [self._before.logits])]
        differences = [_difference(got, want) for got, want in zip(ours, expected, strict=True)]
        if self.engine:
            self._generate(written, ids, theirs)
        merged = theirs.merged(ids)
        if merged is not None:
            differences.append(_difference(ours[0], merged))
        difference = max(differences)
        assert difference <= ATOL, f"{dict(fields)} in {stored}, seed {seed}: logits differ by {differences}"
        self._before = _Accepted(written, ids, unmerged)
        return Outcome(refused="", difference=difference)

    def _ours(self, written: Path, ids: Tensor) -> list[Tensor]:
        """Logits with the adapter, of the model alone, and with the adapter before it, of one step."""
        before = () if self._before is None else (self._before.folder,)
        adapted = load_adapted(self.base, written, *before)
        prompts = [ids, ids, *(() if self._before is None else (self._before.ids,))]
        # Adapters with the same content share a slot.
        slots = [0, NO_ADAPTER, *(min(1, len(adapted.adapters.weights) - 1) for _ in before)]
        return [*adapted.logits(prompts, slots).split([len(each) for each in prompts])]

    def _generate(self, written: Path, ids: Tensor, theirs: "_Theirs") -> None:
        """Two rows of the adapter, one of the model alone, and one of the adapter before it."""
        folders = {"now": written} | ({} if self._before is None else {"before": self._before.folder})
        config = EngineConfig(
            model_path=str(self.base),
            dtype="float32",
            threads=1,
            adapters=AdapterConfig.of(folders),
            scheduler=SchedulerConfig(context_length=64, max_running_requests=4),
        )
        loaded = load(config, progress=False)
        prompts = {"now": [ids, ids.flip(0)], "before": [ids] if "before" in folders else [], None: [ids]}
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        requests = [
            GenerateRequest(
                rid=f"{name}-{number}",
                input_ids=tuple(prompt.tolist()),
                sampling=sampling,
                adapter=None if name is None else loaded.adapters.names[name],
            )
            for name, each in prompts.items()
            for number, prompt in enumerate(each)
        ]
        with closing(Engine.build(loaded, config)) as engine:
            made = engine.generate(requests)
        for request, generation in zip(requests, made, strict=True):
            if request.rid.startswith("before"):
                continue  # PEFT's model of it is gone; its row was in the batch
            whole = torch.tensor([*request.input_ids, *generation.token_ids])
            logits = theirs.alone(whole) if request.adapter is None else theirs.logits(whole)
            require_chosen(logits, whole, len(request.input_ids))

    def _peft(self, fields: Mapping[str, Any], seed: int, written: Path, stored: torch.dtype) -> "_Theirs":
        """PEFT's model with its adapter, which is saved in `written`."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32, attn_implementation="eager")
        given = {"target_modules": [*self.modules]} | {
            name: value for name, value in fields.items() if name not in ONLY_SAVED
        }
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                peft = get_peft_model(model, LoraConfig(**given)).eval()
                _randomize(peft, seed, stored)
                peft.save_pretrained(written)
                theirs = _Theirs(peft)
                theirs.logits(torch.arange(PROMPT))
        except Exception as error:  # PEFT has no common error for what it refuses
            raise NothingToCompareError(f"{type(error).__name__}: {error}") from error
        _store(written, {name: value for name, value in fields.items() if name in ONLY_SAVED}, stored)
        return theirs


@dataclass(frozen=True, slots=True)
class _Theirs:
    """PEFT's model."""

    model: Any

    def logits(self, ids: Tensor) -> Tensor:
        """[T, vocab]"""
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=ids[None]).logits[0]
        return logits

    def alone(self, ids: Tensor) -> Tensor:
        """Without the adapter."""
        with self.model.disable_adapter():
            return self.logits(ids)

    def merged(self, ids: Tensor) -> Tensor | None:
        """None where PEFT does not merge such an adapter. The last call: the model is changed."""
        try:
            merged = self.model.merge_and_unload()
        except (NotImplementedError, RuntimeError):
            return None
        return _Theirs(merged).logits(ids)


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def require_chosen(logits: Tensor, whole: Tensor, prompt: int) -> None:
    """Each token after the first `prompt` of `whole` has the largest logit, but for rounding."""
    before = logits[prompt - 1 : -1]
    chosen = before.gather(1, whole[prompt:, None])[:, 0]
    lost = (before.max(dim=1).values - chosen) / before.abs().max().clamp(min=1.0)
    assert float(lost.max()) <= ATOL, f"tokens {whole[prompt:].tolist()} are worse than the best by {lost.tolist()}"


def require_named(error: str, fields: Mapping[str, Any], stored: torch.dtype, family: str | None = None) -> None:
    """Whether a refusal is of what is not supported, and says what that is. `family`: words about the model."""
    expected = [name for name in fields if name in MAY_BE_REFUSED and name in error]
    expected += [] if family is None or family not in error else [family]
    expected += ["F64"] if stored is torch.float64 and "'F64'" in error else []
    expected += [
        name for name in ("rank_pattern", "alpha_pattern") if name in fields and f"{name} has the key" in error
    ]
    if "target_modules" in fields or "target_parameters" in fields:
        # PEFT finds experts by the names of their projections, too.
        expected += [word for word in ("tensor ", "target_modules", "target_parameters") if word in error]
    # PEFT stores what these train as tensors of other names, which are read before the fields of others.
    trained = {"modules_to_save", "trainable_token_indices", "target_parameters", "bias", "layer_replication"}
    expected += ["tensor"] if trained & fields.keys() and "tensor " in error else []
    assert expected, f"{dict(fields)} in {stored} is refused for something else: {error}"


def _randomize(model: nn.Module, seed: int, stored: torch.dtype) -> None:
    """B begins as zero. Values are numbers of `stored`."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                scale = 0.1 if "lora_B" in name else parameter.shape[-1] ** -0.5
                values = torch.randn(parameter.shape, generator=dice) * scale
                parameter.copy_(values.to(stored).to(parameter.dtype))


def _store(written: Path, fields: Mapping[str, Any], stored: torch.dtype) -> None:
    """Add `fields` to the config, and cast the tensors."""
    tensors, saved = read_files(written)
    if stored is torch.float32:
        (written / "adapter_config.json").write_text(json.dumps(saved | dict(fields)))
        return
    write_files(written, {name: tensor.to(stored) for name, tensor in tensors.items()}, saved | dict(fields))
