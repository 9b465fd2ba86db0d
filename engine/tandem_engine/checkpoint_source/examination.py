"""Whether a checkpoint can be served, from names of files and its config.json: before gigabytes are read or fetched.

The engine examines everything again, and weights for the first time. Errors here are for the user of a command: one
sentence, status 2.
"""

import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from tandem_engine.base.errors import CheckpointError, ConfigError, UnsupportedVariantError
from tandem_engine.base.release import install_hint
from tandem_engine.checkpoint_source.gguf_header import SUFFIX, GgufFacts, gguf_refusal, is_gguf, read_facts
from tandem_engine.checkpoint_source.source import is_repo
from tandem_engine.config import ModelImpl
from tandem_engine.model.checkpoint_folder import (
    INDEX,
    PICKLED,
    SINGLE,
    open_directory,
    read_json_object,
    shown,
)
from tandem_engine.model.config_fields import ConfigFields, read_fields
from tandem_engine.model.families.registry import FAMILIES, find_family
from tandem_engine.model.families.text_towers import text_part

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
MAX_ADAPTER = 1 << 20


def examine_folder(folder: Path, *, impl: ModelImpl, weights: bool = True) -> None:
    """Raise `ConfigError` unless `folder` has a checkpoint that can be served.

    `weights`: whether its files have to be there.
    """
    if is_gguf(folder):
        raise gguf_refusal(folder.name, read_facts(folder))
    if not folder.exists():
        raise ConfigError(
            f"{folder}: no such folder; `tandem models` lists what is here, org/name is a model of the hub"
        )
    try:
        names = {path.name for path in open_directory(folder).path.iterdir()}
        require_checkpoint(names, where=str(folder), folder=folder)
        if weights:
            require_weights(names, where=str(folder))
        examine_config(folder, impl=impl)
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error


def require_checkpoint(names: Collection[str], *, where: str, folder: Path | None = None, made_of: str = "") -> None:
    """Raise `ConfigError` unless a folder or repository with files of these `names` has a config.json.

    `folder`: where they are on this machine; `made_of`: the base model that the repository names.
    """
    if CONFIG in names:
        return
    if ADAPTER in names:
        base = (_base_of(folder) if folder is not None else "") or made_of
        hint = f"merge it into {base}" if base else "merge it into its base model"
        raise ConfigError(f"{where} is an adapter (PEFT), not a model: {hint} and serve the result")
    packed = next((name for name in sorted(names) if name.endswith(SUFFIX)), None)
    if packed is not None:
        facts = read_facts(folder / packed) if folder is not None else GgufFacts(made_of=made_of)
        raise gguf_refusal(f"{where} ({shown(packed)})", facts)
    raise ConfigError(f"{where} has no {CONFIG}; name the checkpoint of a language model in Hugging Face's format")


def require_weights(names: Collection[str], *, where: str) -> None:
    """Raise `ConfigError` unless there are safetensors under the names that the engine reads."""
    if SINGLE in names or INDEX in names:
        return
    pickled = next((name for name in PICKLED if name in names), None)
    if pickled is not None:
        raise ConfigError(
            f"{where} has its weights in {pickled} alone, a pickle, which can run code when loaded and is never read; "
            "convert the checkpoint to safetensors"
        )
    raise ConfigError(f"{where} has no weights: there is no {SINGLE} and no {INDEX}")


def examine_config(folder: Path, *, impl: ModelImpl) -> bool:
    """Whether Tandem's own layers compute the model in `folder`; False: transformers may.

    Raises:
        CheckpointError, ConfigError: it can be computed by none of them.
    """
    whole = read_fields(open_directory(folder))
    if impl is ModelImpl.TRANSFORMERS:
        return False
    fields = text_part(whole)
    family = find_family(fields)
    if family is not None:
        try:
            family.parse(fields)
        except UnsupportedVariantError:
            if impl is ModelImpl.TANDEM or fields is not whole or not _has_transformers():
                raise
            return False
        return True
    if impl is ModelImpl.AUTO and _has_transformers():
        return False
    _refuse_architecture(fields, impl)
    return False


def require_fallback(folder: Path) -> None:
    """Raise `ConfigError` if transformers, as installed here, cannot compute the model in `folder`.

    Another process imports it and torch, which take seconds and memory that a supervisor would keep.
    """
    command = [sys.executable, "-m", "tandem_engine.model.fallback_check", str(folder)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(result.stdout.strip() or f"{folder}: transformers cannot read {CONFIG}")


def _refuse_architecture(fields: ConfigFields, impl: ModelImpl) -> None:
    named = ", ".join(str(name) for name in fields.items("architectures")) or "none"
    if fields.has("auto_map"):
        raise ConfigError(
            f"{fields.path}: the architecture ({shown(named)}) is code in the checkpoint (auto_map), which is never run"
        )
    ours = ", ".join(family.architecture for family in FAMILIES)
    more = "" if impl is ModelImpl.TANDEM else f"; others need transformers: {install_hint('lab')}"
    raise ConfigError(f"{fields.path}: the architecture ({shown(named)}) is not one that Tandem computes: {ours}{more}")


def _has_transformers() -> bool:
    return find_spec("transformers") is not None


def _base_of(folder: Path) -> str:
    """The base model that an adapter names; empty where it does not, or names none."""
    base = read_json_object(folder / ADAPTER, max_bytes=MAX_ADAPTER).get("base_model_name_or_path")
    return base if isinstance(base, str) and is_repo(base) else ""
