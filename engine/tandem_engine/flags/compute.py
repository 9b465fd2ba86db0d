"""What computes: the model, its device, its threads and their cores, and steps replayed as graphs."""

import argparse

from tandem_engine.config import GraphConfig, LoadFormat, Quantization
from tandem_engine.cpu_list import allowed_cpus, can_bind, format_cpus, parse_cpus
from tandem_engine.errors import ConfigError
from tandem_engine.flags.shared import add_device_flag, add_model_impl_flag
from tandem_engine.flags.values import non_negative_int, positive_int

AUTO_AFFINITY = "auto"
NO_AFFINITY = "none"


def add_compute_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_model_impl_flag(group)
    group.add_argument(
        "--load-format",
        choices=[kind.value for kind in LoadFormat],
        default=LoadFormat.AUTO.value,
        help="source of the weights. auto: the model's safetensors files; dummy: random numbers, to measure the speed "
        "and memory of a model from its config.json alone (default: auto)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="weights, and KV unless --kv-cache-dtype differs (default: the checkpoint's; bfloat16 on a GPU)",
    )
    _add_quantization_flag(group)
    add_device_flag(group)
    _add_graph_flags(group)
    group.add_argument(
        "--threads",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="CPU threads of one engine, shared by its ranks; 0 uses torch's default",
    )
    group.add_argument(
        "--cpu-affinity",
        default=AUTO_AFFINITY,
        metavar="CPUS",
        help="cores to which compute threads are bound, such as 0-3,8; none: not bound; auto: separate cores for each "
        "worker of a `tandem up` with several, if there are enough, else as none (default: auto)",
    )


def _add_quantization_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--quantization",
        choices=[kind.value for kind in Quantization],
        default=Quantization.AUTO.value,
        help="format of the projections' weights. auto: as a quantized checkpoint stores them where the device has a "
        "kernel for it (a GPU), else --dtype; dequantize: --dtype; int8: eight bits with a scale per output, which "
        "saves memory and bandwidth, on a CPU too, and changes outputs slightly (default: auto)",
    )


def _add_graph_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cuda-graph-max-bs",
        type=positive_int,
        default=0,
        metavar="N",
        help="rows of the largest decode step that a GPU replays as a graph; a draft counts as a row (default: "
        "enough for --max-running-requests, at most 256)",
    )
    group.add_argument(
        "--cuda-graph-bs",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="N",
        help="rows of each CUDA graph (default: 1, 2, 4, 8, then every 8th to 64, 16th to 256)",
    )
    group.add_argument("--disable-cuda-graph", action="store_true", help="run decode steps without CUDA graphs")


def graph_config(args: argparse.Namespace) -> GraphConfig:
    return GraphConfig(
        enabled=not args.disable_cuda_graph,
        max_rows=args.cuda_graph_max_bs,
        sizes=tuple(args.cuda_graph_bs),
    )


def cpus_of(affinity: str) -> tuple[int, ...]:
    """The cores that `--cpu-affinity` names. Raises `ConfigError` for those that this process may not use."""
    if affinity in (AUTO_AFFINITY, NO_AFFINITY):
        return ()
    try:
        cpus = parse_cpus(affinity)
    except ValueError as error:
        raise ConfigError(f"--cpu-affinity must be auto, none or a list such as 0-3,8: {error}") from None
    if not can_bind():
        raise ConfigError(f"--cpu-affinity {affinity}: this system keeps no threads on cores; drop it")
    if not allowed_cpus().issuperset(cpus):
        raise ConfigError(f"--cpu-affinity {affinity}: this process may use {format_cpus(allowed_cpus())}")
    return cpus
