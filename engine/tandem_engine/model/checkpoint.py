"""From a model directory to a `ModelConfig`, with its end-of-sequence ids and its fingerprint.

    config.json ─────────────▶ fields with bounds ─▶ family ─▶ ModelConfig ─▶ fingerprint
                               (each known, see `known_fields`)
    generation_config.json ──▶ end-of-sequence ids ──────────────┘                ▲
    *.safetensors ───────────▶ headers, checked; samples of the data ─────────────┘
                               (none with random weights)

Tandem's own code parses the files, with a bound on every number: nothing in a checkpoint is executed, `auto_map` is
ignored, and no switch changes this. `fallback` reads models that transformers computes, after the same checks of their
weight files: other architectures, and known ones whose config.json has settings that our layers do not implement.

End-of-sequence ids come from `generation_config.json`, where instruction-tuned checkpoints list their end-of-turn
token; config.json is used if it names none.

The fingerprint is equal for the same weights, different for any others, and cheap. KV pages are only valid for workers
with the same weights, so it is part of a worker's compatibility hash. Reading every byte would double the start-up time
of a large model. Instead a few blocks of every tensor are read, which distinguishes fine-tunes that share a shape and
most of their tensors, and does not depend on the division into shards.

Some checkpoints store an output matrix although config.json declares it equal to the embedding. As in transformers, a
stored matrix that differs is used; an equal copy, as older exporters wrote it, is left out, which saves its memory.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from tandem_engine.base.errors import CheckpointError, ConfigError, UnsupportedVariantError
from tandem_engine.base.release import install_hint
from tandem_engine.config import LoadFormat, ModelConfig, ModelImpl, Quantization
from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor, open_tensors
from tandem_engine.model.checkpoint_folder import ModelDirectory, open_directory, read_json_object, shown
from tandem_engine.model.config_fields import ConfigFields, read_fields
from tandem_engine.model.families.registry import find_family, require_family
from tandem_engine.model.families.text_towers import text_part, text_tensors, tower_of
from tandem_engine.model.quantization.dequantized import dequantized
from tandem_engine.model.quantization.kv_scales import without_scales
from tandem_engine.model.quantization.scheme import Holding, WeightFormat, described, holding_of, read_scheme
from tandem_engine.model.stacked_experts import outputs_first, unstacked_gpt_oss
from tandem_engine.model.tensor_aliases import canonical_tensors
from tandem_engine.model.tensor_names import EMBEDDING, LM_HEAD, require_tensors

MAX_GENERATION_CONFIG = 1 << 20
MAX_EOS_TOKENS = 64


def read_eos(directory: ModelDirectory, config: ConfigFields, *, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids in the order of the file; () when neither file names any.

    Raises:
        CheckpointError: an id is not an integer of the vocabulary.
    """
    owner = config
    if directory.has("generation_config.json"):
        path = directory.file("generation_config.json")
        values = read_json_object(path, max_bytes=MAX_GENERATION_CONFIG)
        generation = ConfigFields(path=path, values=values)
        owner = generation if generation.has("eos_token_id") else config
    ids = owner.items("eos_token_id")
    if len(ids) > MAX_EOS_TOKENS:
        owner.refuse("eos_token_id", f"must name at most {MAX_EOS_TOKENS} tokens")
    return tuple(dict.fromkeys(_token(owner, value, vocab_size) for value in ids))


def _token(owner: ConfigFields, value: object, vocab_size: int) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        owner.refuse("eos_token_id", f"must name tokens of the vocabulary (0 to {vocab_size - 1})")
    return value


DIGEST_BYTES = 16
BLOCK_BYTES = 4096
BLOCKS_PER_TENSOR = 4


def fingerprint(config: ModelConfig, tensors: Mapping[str, ReadableTensor]) -> str:
    """Hexadecimal digest of `config`, of the name, dtype and shape of all tensors, and of samples of their bytes.

    Two releases share KV of models with equal fingerprints, so a field that a release adds to `ModelConfig` counts only
    for models that have another value than its default.

    Raises:
        CheckpointError: a file became unreadable since its header was checked.
    """
    digest = hashlib.blake2b(msgspec.json.encode(stated(config)), digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        for tensor in tensors[name].sources:
            digest.update(msgspec.json.encode((name, str(tensor.dtype), tensor.shape)))
            digest.update(_sample(tensor))
    return digest.hexdigest()


def stated(value: object) -> object:
    """`value` for JSON, without the fields of dataclasses that have their defaults."""
    if isinstance(value, tuple):
        return [*map(stated, value)]
    if not dataclasses.is_dataclass(value):
        return value
    values = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
    return {each.name: stated(held) for each, held in values if held != each.default}


def _sample(tensor: StoredTensor) -> bytes:
    """The whole of a small tensor, evenly spaced blocks of a large one, first and last included."""
    if tensor.size <= BLOCK_BYTES * BLOCKS_PER_TENSOR:
        places = {0: tensor.size}
    else:
        stride = (tensor.size - BLOCK_BYTES) // (BLOCKS_PER_TENSOR - 1)
        places = {index * stride: BLOCK_BYTES for index in range(BLOCKS_PER_TENSOR)}
    try:
        with tensor.path.open("rb", buffering=0) as file:
            blocks = []
            for begin, size in places.items():
                file.seek(tensor.offset + begin)
                blocks.append(file.read(size))
    except OSError as error:
        raise CheckpointError(f"{tensor.path}: tensor {shown(tensor.name)} cannot be read: {error.strerror}") from error
    return b"".join(blocks)


ROWS = 4096
"""Compared at a time."""

logger = logging.getLogger(__name__)


def with_stored_head(config: ModelConfig, tensors: Mapping[str, ReadableTensor]) -> ModelConfig:
    """`config`, with `tie_embeddings` off if the stored output matrix is not the embedding.

    Raises:
        CheckpointError: a file became unreadable since its header was checked.
    """
    head, table = tensors.get(LM_HEAD), tensors.get(EMBEDDING)
    if not config.tie_embeddings or head is None or table is None or _equal(head, table):
        return config
    logger.warning(
        "tie_word_embeddings is true, but the stored lm_head.weight is not the embedding; it is used as it is",
        extra={"fields": {"path": str(head.path)}},
    )
    return replace(config, tie_embeddings=False)


def _equal(head: ReadableTensor, table: ReadableTensor) -> bool:
    if head.shape != table.shape or not head.shape:
        return False
    starts = range(0, head.shape[0], ROWS)
    parts = ((start, min(start + ROWS, head.shape[0])) for start in starts)
    return all(_same_rows(head.read_part(0, *part), table.read_part(0, *part)) for part in parts)


def _same_rows(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool((first.float() == second.float()).all())


def open_weights(
    directory: ModelDirectory, scheme: WeightFormat | None, config: ModelConfig
) -> dict[str, ReadableTensor]:
    """The weights of a model of `config`, under our names. Headers alone are read.

    Scales of KV are no weights and left out: see `kv_scales`.

    Raises:
        CheckpointError: a file is absent or broken, or parts of a quantized matrix do not fit each other.
    """
    tensors = without_scales(open_stored(directory, config))
    if config.moe is not None and config.moe.interleaved:
        return outputs_first(dequantized(unstacked_gpt_oss(tensors), scheme))
    return canonical_tensors(dequantized(tensors, scheme), config)


def open_stored(directory: ModelDirectory, config: ModelConfig) -> dict[str, StoredTensor]:
    """What the files hold of a model of `config`. Raises `CheckpointError`: a file is absent or broken."""
    stored = open_tensors(directory)
    return text_tensors(stored) if config.text_part else stored


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
        impl: what computes the model; `auto` leaves it to transformers when we do not know the architecture.
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
    tensors = open_weights(directory, scheme, config)
    config = with_stored_head(config, tensors)
    require_tensors(config, tensors, where=directory.path)
    return replace(config, fingerprint=fingerprint(config, tensors))


def parse_config(directory: ModelDirectory) -> ModelConfig:
    """The part of `read_model_config` that needs no weights, of a model we compute; the fingerprint stays empty."""
    whole = read_fields(directory)
    fields = text_part(whole)
    config = replace(
        require_family(fields).parse(fields),
        quantization=described(read_scheme(whole), Holding.DTYPE),
        text_part=fields is not whole,
    )
    return replace(config, eos_token_ids=read_eos(directory, fields, vocab_size=config.vocab_size))


def _why_transformers(fields: ConfigFields, impl: ModelImpl) -> str | None:
    """Why transformers is to compute the model; None for one that we compute. Raises `CheckpointError`."""
    if impl is ModelImpl.TRANSFORMERS:
        return "--model-impl is transformers"
    try:
        served = text_part(fields)
        family = find_family(served)
        if family is None:
            return f"{fields.path}: architectures names none of those that Tandem computes itself"
        family.parse(served)
    except UnsupportedVariantError as error:
        return str(error)
    return None


def _read_fallback(directory: ModelDirectory, fields: ConfigFields, reason: str) -> ModelConfig:
    """`reason`: why we do not compute it ourselves."""
    if tower_of(fields) is not None:
        raise CheckpointError(f"{reason}; transformers does not compute the text part of a model that takes images")
    try:
        # No other path needs transformers installed, or waits for its import.
        from tandem_engine.model.fallback_config import fallback_fingerprint, read_fallback_config
    except ImportError as error:
        raise CheckpointError(
            f"{reason}; transformers, which may compute it, cannot be imported ({error}); {install_hint('lab')}"
        ) from error
    config = read_fallback_config(directory, fields)
    logger.info("transformers computes the model", extra={"fields": {"reason": reason}})
    config = replace(config, eos_token_ids=read_eos(directory, fields, vocab_size=config.vocab_size))
    weights = fingerprint(config, open_tensors(directory))
    return replace(config, fingerprint=fallback_fingerprint(weights, fields))
