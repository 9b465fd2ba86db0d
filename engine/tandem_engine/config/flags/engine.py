"""The whole table of an engine's flags: each group of them makes one part of `EngineConfig`."""

import argparse
from functools import cache

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import allowed_cpus, can_bind, format_cpus, parse_cpus
from tandem_engine.config import (
    OPEN_SETTINGS,
    AttentionLibrary,
    EngineConfig,
    GrammarConfig,
    GraphConfig,
    LoadFormat,
    ModelImpl,
    OperationConfig,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
)
from tandem_engine.config.flags.adapters import adapter_config, add_adapter_flags
from tandem_engine.config.flags.cache import (
    add_cache_flags,
    add_host_flags,
    add_transfer_flags,
    cache_config,
    transfer_config,
)
from tandem_engine.config.flags.scheduler import (
    add_scheduler_flags,
    add_speculative_flags,
    scheduler_config,
    speculative_config,
)
from tandem_engine.config.flags.types import (
    add_device_flag,
    add_model_impl_flag,
    given_again,
    non_negative_int,
    positive_float,
    positive_int,
)

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
    _add_attention_flag(group)
    _add_graph_flags(group)
    group.add_argument(
        "--threads",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="CPU threads of one engine, shared by its ranks; 0: as many as the CPU quota and the allowed CPUs give",
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


def _add_attention_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--attention-backend",
        type=str.lower,
        choices=[kind.value for kind in AttentionLibrary],
        default=AttentionLibrary.AUTO.value,
        help="what computes long prompts on a GPU, in steps without a graph. auto: the fastest of the others that the "
        "model and the GPU allow, measured at the first start and kept next to the kernels; triton_attn: the kernels "
        "that compute everything else (default: auto)",
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
    group.add_argument(
        "--cuda-graph-max-bs-prefill",
        type=positive_int,
        default=0,
        metavar="N",
        help="tokens of the largest step with prompts that a GPU replays as a graph (default: what a step can have, "
        "at most 1024, or up to 4096 of narrow models)",
    )
    group.add_argument(
        "--cuda-graph-bs-prefill",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="N",
        help="tokens of each CUDA graph of steps with prompts (default: 16, 32, 64, 128, 192, then every 64th to 512, "
        "128th to 1024, 256th beyond)",
    )
    group.add_argument(
        "--disable-prefill-cuda-graph", action="store_true", help="run steps with prompts without CUDA graphs"
    )
    group.add_argument("--disable-cuda-graph", action="store_true", help="run all steps without CUDA graphs")


def graph_config(args: argparse.Namespace) -> GraphConfig:
    return GraphConfig(
        enabled=not args.disable_cuda_graph,
        max_rows=args.cuda_graph_max_bs,
        sizes=tuple(args.cuda_graph_bs),
        prompts=not args.disable_prefill_cuda_graph,
        max_prompt_tokens=args.cuda_graph_max_bs_prefill,
        prompt_sizes=tuple(args.cuda_graph_bs_prefill),
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


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    grammar = GrammarConfig()
    group = parser.add_argument_group("structured output")
    group.add_argument(
        "--grammar-backend",
        choices=("llguidance", "none"),
        default=grammar.backend,
        help="backend that constrains outputs to a JSON schema, regex or grammar; none rejects such requests (default: "
        "llguidance)",
    )
    group.add_argument(
        "--grammar-compile-timeout",
        type=float,
        default=grammar.compile_timeout,
        metavar="S",
        help="CPU seconds that one grammar may take to compile before it is rejected (default: "
        f"{grammar.compile_timeout:g})",
    )
    group.add_argument(
        "--grammar-cache-size",
        type=positive_int,
        default=grammar.cache_size,
        metavar="N",
        help=f"compiled grammars kept for later requests (default: {grammar.cache_size})",
    )


def grammar_config(args: argparse.Namespace) -> GrammarConfig:
    return GrammarConfig(
        backend=args.grammar_backend,
        compile_timeout=args.grammar_compile_timeout,
        cache_size=args.grammar_cache_size,
    )


def add_operation_flags(parser: argparse.ArgumentParser) -> None:
    scheduler = SchedulerConfig()
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--watchdog-timeout",
        type=positive_float,
        default=scheduler.watchdog_timeout,
        metavar="S",
        help="seconds after which a step counts as hung. The engine then writes stacks, queues and pages, and stops "
        f"responding, so that it is restarted (default: {scheduler.watchdog_timeout:g})",
    )
    group.add_argument(
        "--crash-dump-folder",
        default="",
        metavar="DIR",
        help="directory for the state of a hung engine, one file per engine (default: the engine's log)",
    )
    group.add_argument(
        "--torch-profiler-dir",
        default="",
        metavar="DIR",
        help="directory for Chrome traces of `tandem ctl profile` (default: profiling is disabled)",
    )


def operation_config(args: argparse.Namespace) -> OperationConfig:
    return OperationConfig(torch_profiler_dir=args.torch_profiler_dir, crash_dump_folder=args.crash_dump_folder)


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    parallel = ParallelConfig()
    group = parser.add_argument_group("tensor parallelism")
    group.add_argument(
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        type=positive_int,
        default=parallel.tp_size,
        metavar="N",
        help="processes that share the model: each holds a part of every layer and of the KV. "
        "N must divide the attention heads and the intermediate size; workers of different N exchange KV (default: 1)",
    )
    group.add_argument(
        "--nnodes",
        type=positive_int,
        default=parallel.nnodes,
        metavar="N",
        help="number of machines, each with the same number of ranks. Start the same `tandem worker` on all of them, "
        "each with a different --node-rank and --host (default: 1)",
    )
    group.add_argument(
        "--node-rank",
        type=non_negative_int,
        default=parallel.node_rank,
        metavar="R",
        help="rank of this machine. Node 0 is the worker; the others only compute for it (default: 0)",
    )
    group.add_argument(
        "--dist-init-addr",
        default=parallel.dist_init_addr,
        metavar="HOST:PORT",
        help="address at which node 0 accepts the other nodes; it listens on that port of its --host",
    )
    group.add_argument(
        "--dist-init-timeout",
        type=float,
        default=parallel.init_timeout,
        metavar="S",
        help=f"timeout of connections between machines at start, in seconds (default: {parallel.init_timeout:g})",
    )
    group.add_argument(
        "--dist-timeout",
        type=float,
        default=parallel.timeout,
        metavar="S",
        help="timeout of waits between ranks, at start and within a step, in seconds; after it the engine ends "
        f"(default: {parallel.timeout:g})",
    )


def parallel_config(args: argparse.Namespace) -> ParallelConfig:
    return ParallelConfig(
        tp_size=args.tensor_parallel_size,
        timeout=args.dist_timeout,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        dist_init_addr=args.dist_init_addr,
        init_timeout=args.dist_init_timeout,
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of `EngineConfig` except the model and the role, in the order in which help shows them."""
    add_compute_flags(parser)
    add_parallel_flags(parser)
    add_cache_flags(parser)
    add_host_flags(parser)
    add_scheduler_flags(parser)
    add_operation_flags(parser)
    add_speculative_flags(parser)
    add_transfer_flags(parser)
    add_grammar_flags(parser)
    add_adapter_flags(parser)


@cache
def engine_flags() -> frozenset[str]:
    """Every name of a flag of an engine."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_flags(parser)
    return frozenset(parser._option_string_actions)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Build the configuration from parsed flags, `args.model` and `args.role` included.

    Raises `ConfigError` for a combination that cannot work.
    """
    return EngineConfig(
        model_path=args.model,
        model_impl=ModelImpl(args.model_impl),
        load_format=LoadFormat(args.load_format),
        dtype=args.dtype,
        quantization=Quantization(args.quantization),
        device=args.device,
        threads=args.threads,
        cpus=cpus_of(args.cpu_affinity),
        context_length=args.context_length,
        left_open=tuple(name for name in OPEN_SETTINGS if getattr(args, name) is None),
        cache=cache_config(args),
        scheduler=scheduler_config(args),
        disagg=transfer_config(args),
        speculative=speculative_config(args),
        parallel=parallel_config(args),
        grammar=grammar_config(args),
        graphs=graph_config(args),
        attention=AttentionLibrary(args.attention_backend),
        operation=operation_config(args),
        adapters=adapter_config(args),
    )


def engine_argv(args: argparse.Namespace) -> list[str]:
    """The flags again, as arguments for a child process that uses the same table."""
    return given_again(args, add_engine_flags)
