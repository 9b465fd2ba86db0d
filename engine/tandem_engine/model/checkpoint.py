"""From a model directory to a `ModelConfig`.

    config.json ─────────────▶ fields with bounds ─▶ family ─▶ ModelConfig ─▶ fingerprint
                               (each known, see `known_fields`)
    generation_config.json ──▶ end-of-sequence ids ──────────────┘                ▲
    *.safetensors ───────────▶ headers, checked; samples of the data ─────────────┘
                               (none with random weights)

The files are parsed here, by our own code, with a bound on every number: nothing in a checkpoint is
executed, `auto_map` is ignored, and there is no switch that changes this. A model that transformers shall
compute is read by `fallback`, after the same checks of its weight files: one of another architecture, or one of ours
whose config.json says something that our layers do not do.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from tandem_engine.config import LoadFormat, ModelConfig, ModelImpl, Quantization
from tandem_engine.errors import CheckpointError, ConfigError, UnsupportedVariantError
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.directory import ModelDirectory, open_directory
from tandem_engine.model.eos import read_eos
from tandem_engine.model.fingerprint import fingerprint
from tandem_engine.model.json_file import read_json_object
from tandem_engine.model.quantization.holding import Holding, described, holding_of
from tandem_engine.model.quantization.scheme import read_scheme
from tandem_engine.model.registry import find_family, require_family
from tandem_engine.model.shards import open_tensors
from tandem_engine.model.stored_head import with_stored_head
from tandem_engine.model.stored_weights import open_weights
from tandem_engine.model.tensor_names import require_tensors

logger = logging.getLogger(__name__)

MAX_CONFIG = 1 << 20
"""Bytes of a config.json."""


def read_model_config(
    path: str | Path,
    *,
    impl: ModelImpl = ModelImpl.TANDEM,
    load_format: LoadFormat = LoadFormat.AUTO,
    quantization: Quantization = Quantization.AUTO,
    device: str | torch.device = "cpu",
) -> ModelConfig:
    """Read the model directory `path`: its config, and its weight files as far as identity needs it.

    Args:
        impl: who shall compute the model; `auto` leaves it to transformers when we do not know the architecture.
        load_format: without weight files, the identity is the config's.
        quantization: how projections are to be held, on `device`.

    Raises:
        ConfigError: transformers is to compute a model without weights, or `quantization` does not go with the model.
        CheckpointError: anything is absent, malformed, out of bounds, unsupported or inconsistent. The
            message names the file and the field or tensor.
    """
    directory = open_directory(path)
    fields = read_fields(directory)
    reason = None if impl is ModelImpl.TANDEM else _why_transformers(fields, impl)
    if reason is not None:
        if load_format is LoadFormat.DUMMY:
            raise ConfigError(f"--load-format dummy works with models that Tandem computes itself: {reason}")
        if quantization is Quantization.INT8:
            raise ConfigError(f"--quantization int8 works with models that Tandem computes itself: {reason}")
        return _read_fallback(directory, fields, reason)
    scheme = read_scheme(fields)
    holding = holding_of(quantization, scheme, torch.device(device))
    config = replace(parse_config(directory), quantization=described(scheme, holding))
    if load_format is LoadFormat.DUMMY:
        return replace(config, fingerprint=fingerprint(config, {}))
    tensors = open_weights(directory, scheme)
    config = with_stored_head(config, tensors)
    require_tensors(config, tensors, where=directory.path)
    return replace(config, fingerprint=fingerprint(config, tensors))


def read_fields(directory: ModelDirectory) -> ConfigFields:
    """config.json, parsed and bounded in size. Raises `CheckpointError`."""
    path = directory.file("config.json")
    return ConfigFields(path=path, values=read_json_object(path, max_bytes=MAX_CONFIG))


def parse_config(directory: ModelDirectory) -> ModelConfig:
    """The part of `read_model_config` that needs no weights, of a model we compute; the fingerprint stays empty."""
    fields = read_fields(directory)
    config = replace(require_family(fields).parse(fields), quantization=described(read_scheme(fields), Holding.DTYPE))
    return replace(config, eos_token_ids=read_eos(directory, fields, vocab_size=config.vocab_size))


def _why_transformers(fields: ConfigFields, impl: ModelImpl) -> str | None:
    """Why transformers is to compute the model; None for one that we compute. Raises `CheckpointError`."""
    if impl is ModelImpl.TRANSFORMERS:
        return "--model-impl is transformers"
    family = find_family(fields)
    if family is None:
        return f"{fields.path}: architectures names none of those that Tandem computes itself"
    try:
        family.parse(fields)
    except UnsupportedVariantError as error:
        return str(error)
    return None


def _read_fallback(directory: ModelDirectory, fields: ConfigFields, reason: str) -> ModelConfig:
    """`reason`: why we do not compute it ourselves."""
    try:
        # Nobody else needs transformers installed, or waits for its import.
        from tandem_engine.model.fallback.config import fallback_fingerprint, read_fallback_config
    except ImportError as error:
        raise CheckpointError(
            f"{reason}; transformers, which may compute it, cannot be imported ({error}); install tandem[reference]"
        ) from error
    config = read_fallback_config(directory, fields)
    logger.info("transformers computes the model", extra={"fields": {"reason": reason}})
    config = replace(config, eos_token_ids=read_eos(directory, fields, vocab_size=config.vocab_size))
    weights = fingerprint(config, open_tensors(directory))
    return replace(config, fingerprint=fallback_fingerprint(weights, fields))
