"""Adapters that PEFT itself makes from random configs, and what the engine does with them: equal outputs, or a refusal.

    python -m tandem_testing.lora_draws --family qwen3 --draws 200 --seed 7

Every field of `LoraConfig` has values here that are not its default. A draw has a few of them at a time. PEFT adds the
adapter to the model of transformers, its matrices get random values, and it is saved and read by the engine. If the
engine accepts the folder, its logits are those of PEFT's model, unmerged and merged. It may refuse a folder only for a
field or a module that it does not support, and names it.

A config that PEFT refuses, or cannot save, is drawn again: there is nothing to compare.
"""

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem_engine.base.errors import CheckpointError
from tandem_services.cli.flags import bundled_model
from tandem_testing.adapted_models import load_adapted
from tandem_testing.adapters import ATTENTION, SEVEN
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

ATOL = 1e-3
"""Of logits, which random adapters make large."""

FAMILIES = {"tandem-mini": SEVEN, "qwen3": SEVEN, "mixtral": ATTENTION}
"""With the projections that an adapter may have."""

MAX_CHANGED = 5
PROMPT = 7

PATTERNS = ("q_proj", "layers.1.self_attn.v_proj", "self_attn.o_proj", "model.layers.0.self_attn.k_proj")
REGEXES = (r"^model\.layers\.0\..*", r".*\.(q|k)_proj", r"layers\.[01]\.self_attn\.q_proj")
INITIAL = (False, "gaussian", "orthogonal", "eva", "olora", "pissa", "pissa_niter_2")

FIELDS: Mapping[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM",),
    "auto_mapping": ({"base_model_class": "X", "parent_library": "y"},),
    "peft_version": ("0.0.1",),
    "base_model_name_or_path": ("somewhere/else",),
    "revision": ("main",),
    "inference_mode": (True,),
    "r": (1, 3, 5, 16),
    "target_modules": ("all-linear", r".*\.layers\.1\..*(q|v)_proj", ["q_proj"], ["k_proj", "o_proj"], ["lm_head"]),
    "exclude_modules": (["q_proj"], r".*\.layers\.0\..*"),
    "lora_alpha": (1, 3, 16, -4, 2.5),
    "lora_dropout": (0.1,),
    "fan_in_fan_out": (True,),
    "bias": ("all", "lora_only"),
    "use_rslora": (True,),
    "modules_to_save": (["norm"], ["lm_head"]),
    "init_lora_weights": INITIAL,
    "layers_to_transform": ([1], 0),
    "layers_pattern": ("layers", ["layers"]),
    "rank_pattern": ({PATTERNS[0]: 2}, {PATTERNS[1]: 7, PATTERNS[0]: 3}, {PATTERNS[3]: 1}, {REGEXES[1]: 2}),
    "alpha_pattern": ({PATTERNS[0]: 5}, {PATTERNS[2]: -3}, {PATTERNS[1]: 1.5}, {REGEXES[0]: 4}, {REGEXES[2]: 9}),
    "megatron_config": ({"a": 1},),
    "megatron_core": ("megatron.other",),
    "trainable_token_indices": ([0, 3], {"embed_tokens": [1]}),
    "loftq_config": ({"loftq_bits": 4},),
    "eva_config": ({"rho": 1.0},),
    "corda_config": ({"corda_method": "kpm"},),
    "lora_ga_config": ({"direction": "ArB2r"},),
    "use_dora": (True,),
    "velora_config": ({"rank": 2},),
    "alora_invocation_tokens": ([1, 2],),
    "use_qalora": (True,),
    "qalora_group_size": (8,),
    "monteclora_config": ({"num_samples": 2},),
    "layer_replication": ([[0, 2], [1, 2]],),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
    "lora_bias": (True,),
    "target_parameters": (["mlp.experts.gate_up_proj"], ["mlp.up_proj.weight"]),
    "use_bdlora": ({"nblocks": 2},),
    "arrow_config": ({"top_k": 2},),
    "kasa_config": ({"beta": 0.1},),
    "ensure_weight_tying": (True,),
}
"""Of each field, values that are not its default."""

NEEDED: Mapping[str, Mapping[str, Any]] = {"layers_pattern": {"layers_to_transform": [1]}}
"""What PEFT requires with a field."""

ONLY_SAVED = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "corda_config",
        "eva_config",
        "kasa_config",
        "loftq_config",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "monteclora_config",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "use_bdlora",
        "use_qalora",
        "velora_config",
    }
)
"""Fields that are written to the saved config alone: PEFT needs other libraries, data or layers for them, or replaces
what they say."""

MAY_BE_REFUSED = frozenset(
    {
        "alora_invocation_tokens",
        "arrow_config",
        "bias",
        "init_lora_weights",
        "kasa_config",
        "layer_replication",
        "lora_bias",
        "modules_to_save",
        "monteclora_config",
        "target_parameters",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_qalora",
        "velora_config",
    }
)
"""Fields that the engine does not support with some value; documented in docs/adapters.md."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a draw."""

    refused: str
    """The engine's reason; "" if it has accepted the adapter."""
    difference: float = 0.0
    """Largest of a logit, to PEFT's model."""


class NothingToCompareError(Exception):
    """PEFT refuses the config, or makes nothing of it."""


@dataclass(kw_only=True)
class LoraDraws:
    """Adapters of one checkpoint. `folder`: for what is written."""

    family: str
    folder: Path
    _number: int = 0

    def __post_init__(self) -> None:
        bundled = self.family == "tandem-mini"
        self.base = bundled_model() if bundled else write_tiny_checkpoint(self.family, self.folder / self.family)

    def fields(self, dice: random.Random) -> dict[str, Any]:
        """A few fields with values that are not their defaults."""
        names = dice.sample(sorted(FIELDS), dice.randint(1, MAX_CHANGED))
        return {name: dice.choice(FIELDS[name]) for name in names}

    def outcome(self, fields: Mapping[str, Any], seed: int) -> Outcome:
        """With what `fields` need of others.

        Raises `NothingToCompareError`, and `AssertionError` for a wrong output or refusal.
        """
        self._number += 1
        fields = {name: value for each in fields for name, value in NEEDED.get(each, {}).items()} | dict(fields)
        written = self.folder / f"adapter-{self._number}"
        ids = torch.randint(90, (PROMPT,), generator=torch.Generator().manual_seed(seed))
        unmerged, merged = self._peft(fields, seed, written, ids)
        try:
            adapted = load_adapted(self.base, written)
        except CheckpointError as error:
            require_named(str(error), fields)
            return Outcome(refused=str(error))
        logits = adapted.logits([ids], [0])
        difference = max(float((logits - theirs).abs().max()) for theirs in (unmerged, merged) if theirs is not None)
        assert difference <= ATOL, f"{dict(fields)}: logits differ by {difference}"
        return Outcome(refused="", difference=difference)

    def _peft(self, fields: Mapping[str, Any], seed: int, written: Path, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of PEFT's model with its adapter, unmerged, and merged unless PEFT cannot; the adapter is saved in
        `written`."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32, attn_implementation="eager")
        given = {"target_modules": [*FAMILIES[self.family]]} | {
            name: value for name, value in fields.items() if name not in ONLY_SAVED
        }
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                peft = get_peft_model(model, LoraConfig(**given)).eval()
                _randomize(peft, seed)
                peft.save_pretrained(written)
                with torch.inference_mode():
                    unmerged = peft(input_ids=ids[None]).logits[0]
                    merged = _merged(peft, ids)
        except Exception as error:  # PEFT has no common error for what it refuses
            raise NothingToCompareError(f"{type(error).__name__}: {error}") from error
        _save_fields(written, {name: value for name, value in fields.items() if name in ONLY_SAVED})
        return unmerged, merged


def _merged(model: Any, ids: Tensor) -> Tensor | None:
    """None where PEFT does not merge such an adapter."""
    try:
        merged = model.merge_and_unload()
    except (NotImplementedError, RuntimeError):
        return None
    logits: Tensor = merged(input_ids=ids[None]).logits[0]
    return logits


def require_named(error: str, fields: Mapping[str, Any]) -> None:
    """Whether a refusal is of what is not supported, and says what that is."""
    expected = [name for name in fields if name in MAY_BE_REFUSED and name in error]
    expected += [
        name for name in ("rank_pattern", "alpha_pattern") if name in fields and f"{name} has the key" in error
    ]
    if "target_modules" in fields or "target_parameters" in fields:
        # PEFT finds experts by the names of their projections, too.
        expected += [word for word in ("tensor ", "target_modules", "target_parameters") if word in error]
    # PEFT stores what these train as tensors of other names, which are read before the fields of others.
    trained = {"modules_to_save", "trainable_token_indices", "target_parameters", "bias", "layer_replication"}
    expected += ["tensor"] if trained & fields.keys() and "tensor " in error else []
    assert expected, f"{dict(fields)} is refused for something else: {error}"


def _randomize(model: nn.Module, seed: int) -> None:
    """B begins as zero."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                scale = 0.1 if "lora_B" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * scale)


def _save_fields(written: Path, fields: Mapping[str, Any]) -> None:
    path = written / "adapter_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | dict(fields)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=[*FAMILIES], default="qwen3", help="of the base (default qwen3)")
    parser.add_argument("--draws", type=int, default=100, help="adapters that are compared or refused (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    args = parser.parse_args()
    dice, equal, refused, skipped = random.Random(args.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        draws = LoraDraws(family=args.family, folder=Path(folder))
        while equal + refused < args.draws:
            try:
                outcome = draws.outcome(draws.fields(dice), dice.randrange(1 << 30))
            except NothingToCompareError:
                skipped += 1
                continue
            equal, refused = equal + (not outcome.refused), refused + bool(outcome.refused)
    figures = {"family": args.family, "equal": equal, "refused": refused, "not_made_by_peft": skipped}
    sys.stdout.write(f"{json.dumps(figures)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
