"""Flags of LoRA adapters. Names are vLLM's; --lora-dir is our own."""

import argparse
import json

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AdapterConfig, AdapterSource
from tandem_engine.config.adapters import DEFAULT_MAX_RANK, DEFAULT_TURN_S, MAX_ADAPTERS
from tandem_engine.config.flags.types import positive_float, positive_int

JSON_FIELDS = {"name", "path", "base_model_name"}
"""The base model is the one that is served, whatever the third one is."""


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRA adapters")
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="accepted for vLLM; adapters need no switch",
    )
    group.add_argument(
        "--lora-modules",
        type=lora_module,
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters, each a folder as PEFT saves it, or for `serve` and `up` a repository of the Hugging Face hub "
        "(NAME=org/repo@revision); also as JSON such as "
        '\'{"name": "sql", "path": "adapters/sql"}\'. Requests name one as their model; repeatable',
    )
    group.add_argument(
        "--max-lora-rank",
        type=positive_int,
        default=DEFAULT_MAX_RANK,
        metavar="R",
        help="largest rank of an adapter; one above it is an error (default: %(default)s)",
    )
    group.add_argument(
        "--max-loras",
        type=positive_int,
        default=0,
        metavar="N",
        help="accepted for vLLM; on a CPU a step may have any number of adapters",
    )
    group.add_argument(
        "--max-cpu-loras",
        type=positive_int,
        default=0,
        metavar="N",
        help=f"most adapters that a worker keeps in memory, at least --max-loras (default: {MAX_ADAPTERS})",
    )
    group.add_argument(
        "--lora-turn",
        type=positive_float,
        default=DEFAULT_TURN_S,
        metavar="SECONDS",
        help="with more adapters in use than --max-cpu-loras: how long one is used before it makes way for one that "
        "waits (default: %(default)s)",
    )
    group.add_argument(
        "--lora-dir",
        default="",
        metavar="DIR",
        help="folder of all adapters: paths are relative to it, and what lies outside, also by a link, is an error "
        "(default: any path)",
    )
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let `tandem ctl WORKER load-adapter` and `unload-adapter` change the adapters of a running worker; not "
        "with tensor parallelism",
    )


def lora_module(text: str) -> str:
    """argparse type: `text` itself, if it names an adapter and its folder."""
    try:
        source_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def source_of(text: str) -> AdapterSource:
    """Of NAME=FOLDER, or of a JSON object. Raises `ConfigError`."""
    if text.lstrip().startswith("{"):
        return _of_json(text)
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"must be NAME=FOLDER, or a JSON object with name and path, got {text[:200]!r}")
    return AdapterSource(name=name, path=path)


def _of_json(text: str) -> AdapterSource:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{text[:200]!r} is no JSON: {error}") from error
    unknown = sorted(set(fields) - JSON_FIELDS)
    if unknown:
        raise ConfigError(f"an adapter has no field {unknown[0][:80]!r}: it has name and path")
    for field in ("name", "path"):
        if not isinstance(fields.get(field), str) or not fields[field]:
            raise ConfigError(f"an adapter needs {field}, a text, got {text[:200]!r}")
    return AdapterSource(name=fields["name"], path=fields["path"])


def adapter_config(args: argparse.Namespace) -> AdapterConfig:
    """Looks at no file. Raises `ConfigError`."""
    if args.max_cpu_loras and args.max_loras > args.max_cpu_loras:
        raise ConfigError(f"--max-cpu-loras {args.max_cpu_loras} is below --max-loras {args.max_loras}: raise it")
    config = AdapterConfig(
        sources=tuple(map(source_of, args.lora_modules)),
        max_rank=args.max_lora_rank,
        max_loaded=args.max_cpu_loras or MAX_ADAPTERS,
        folder=args.lora_dir,
        turn_s=args.lora_turn,
        allow_updates=args.allow_runtime_lora_updating,
    )
    if len(config.sources) > config.max_loaded:
        raise ConfigError(
            f"--lora-modules has {len(config.sources)} adapters, at most {config.max_loaded} are kept in memory: leave "
            "some out, or raise --max-cpu-loras"
        )
    return config
