"""From a model directory to a `ModelConfig`.

    config.json ─────────────▶ fields with bounds ─▶ family ─▶ ModelConfig ─▶ fingerprint
    generation_config.json ──▶ end-of-sequence ids ──────────────┘                ▲
    *.safetensors ───────────▶ headers, checked; samples of the data ─────────────┘

The files are parsed here, by our own code, with a bound on every number: nothing in a checkpoint is
executed, `auto_map` is ignored, and there is no switch that changes this.
"""

from dataclasses import replace
from pathlib import Path

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.directory import ModelDirectory, open_directory
from tandem_engine.model.eos import read_eos
from tandem_engine.model.expert_tensors import canonical_experts
from tandem_engine.model.fingerprint import fingerprint
from tandem_engine.model.json_file import read_json_object
from tandem_engine.model.registry import require_family
from tandem_engine.model.shards import open_tensors
from tandem_engine.model.tensor_names import require_tensors

MAX_CONFIG = 1 << 20
"""Bytes of a config.json."""


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the model directory `path`: its config, and its weight files as far as identity needs it.

    Raises:
        CheckpointError: anything is absent, malformed, out of bounds, unsupported or inconsistent. The
            message names the file and the field or tensor.
    """
    directory = open_directory(path)
    config = parse_config(directory)
    tensors = canonical_experts(open_tensors(directory))
    require_tensors(config, tensors, where=directory.path)
    return replace(config, fingerprint=fingerprint(config, tensors))


def parse_config(directory: ModelDirectory) -> ModelConfig:
    """The part of `read_model_config` that needs no weights; the fingerprint stays empty."""
    path = directory.file("config.json")
    fields = ConfigFields(path=path, values=read_json_object(path, max_bytes=MAX_CONFIG))
    family = require_family(fields)
    if fields.has("quantization_config"):
        fields.refuse("quantization_config", "is not supported; use a checkpoint that is not quantised")
    config = family.read(fields)
    return replace(config, eos_token_ids=read_eos(directory, fields, vocab_size=config.vocab_size))
