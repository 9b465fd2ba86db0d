"""The engine's command-line flags: one table for `tandem-engine serve`, `tandem worker` and `tandem up`.

Names follow SGLang and vLLM where they have one. Standard library and `config` only, so that a process
without torch can show, check and forward them.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from tandem_engine.config import (
    DEVICES,
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    GrammarConfig,
    GraphConfig,
    HostConfig,
    KvCacheDtype,
    LoadFormat,
    ModelImpl,
    OperationConfig,
    ParallelConfig,
    PreemptionMode,
    Quantization,
    Role,
    SchedulePolicy,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
    WritePolicy,
)
from tandem_engine.cpu_list import allowed_cpus, can_bind, format_cpus, parse_cpus
from tandem_engine.errors import ConfigError
from tandem_engine.names import DigestKind, LinkTransport

GIB = 1 << 30
AUTO_AFFINITY = "auto"
NO_AFFINITY = "none"

_SCHEDULER_FLAGS = (
    "max_running_requests",
    "max_queued_requests",
    "max_sessions",
    "session_ttl",
    "max_tokens_per_step",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "long_prefill_token_threshold",
    "policy_ageing_seconds",
    "priority_preemption_threshold",
    "watermark",
)


def positive_int(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    value = non_negative_int(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return value


def non_negative_int(text: str) -> int:
    """argparse type: decimal digits only; Python's own int() would take ' 5 ' and '1_000'."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def add_model_impl_flag(parser: "argparse._ActionsContainer") -> None:
    """Add `--model-impl`, which `verify` has too."""
    parser.add_argument(
        "--model-impl",
        choices=[impl.value for impl in ModelImpl],
        default=ModelImpl.AUTO.value,
        help="who computes the model. tandem: fast, for llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2 and "
        "gemma3_text; transformers: slower, for any causal model whose attention goes through transformers' "
        "attention interface; auto: tandem where it knows the architecture (default auto)",
    )


def add_quantization_flag(parser: "argparse._ActionsContainer") -> None:
    """Add `--quantization`."""
    parser.add_argument(
        "--quantization",
        choices=[kind.value for kind in Quantization],
        default=Quantization.AUTO.value,
        help="how projections are held. auto: as a quantized checkpoint stores them where the device has a kernel for "
        "it (a GPU), else in --dtype; dequantize: in --dtype; int8: rounded to eight bits with a scale for each "
        "output, which saves memory and its bandwidth on a CPU too, and changes outputs a little (default auto)",
    )


def add_device_flag(parser: "argparse._ActionsContainer") -> None:
    """Add `--device`, which `verify` has too."""
    parser.add_argument(
        "--device",
        type=device_name,
        default="cpu",
        metavar="{cpu,cuda,cuda:N}",
        help="where the model runs: cuda is the first GPU that the process sees; with several ranks each has one, from "
        "the one named upwards (default cpu)",
    )


def device_name(text: str) -> str:
    """argparse type: a device that engines run on."""
    if not DEVICES.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def _add_graph_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cuda-graph-max-bs",
        type=positive_int,
        default=0,
        metavar="N",
        help="rows of the largest decode step that a GPU replays as a graph; a draft counts as a row (default: what "
        "--max-running-requests can need, at most 256)",
    )
    group.add_argument(
        "--cuda-graph-bs",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="N",
        help="rows of each graph (default 1, 2, 4, 8, then every 8th to 64, 16th to 256)",
    )
    group.add_argument("--disable-cuda-graph", action="store_true", help="queue every operation of every step")


def add_kv_cache_dtype_flag(parser: argparse._ActionsContainer) -> None:
    """`--kv-cache-dtype`, for every command that has a KV cache."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[kind.value for kind in KvCacheDtype],
        default=KvCacheDtype.AUTO.value,
        help="dtype of KV pages; fp8, the same as fp8_e4m3, holds twice the tokens of bfloat16 and uses the scales of "
        "checkpoints that have some (default auto: the model's)",
    )


def add_accuracy_flags(parser: argparse.ArgumentParser) -> None:
    """All of `tandem accuracy` but the model."""
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="PATH",
        help="further checkpoints of the same vocabulary, such as a quantized one",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what is predicted (default: a text that comes along)"
    )
    parser.add_argument("--tokens", type=positive_int, default=4096, metavar="N", help="of it, at most (default 4096)")
    parser.add_argument(
        "--window", type=positive_int, default=512, metavar="N", help="tokens that are seen together (default 512)"
    )
    parser.add_argument(
        "--baseline-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="weights and KV of --model that all others are compared with (default float32)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("float32", "bfloat16"),
        default=["float32", "bfloat16"],
        help="of weights (default: both)",
    )
    parser.add_argument(
        "--quantization",
        nargs="+",
        choices=[kind.value for kind in Quantization],
        default=[Quantization.AUTO.value],
        help="how projections are held, with each dtype: auto (as the checkpoint has them, where the device can), "
        "dequantize, int8 (default auto)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=[kind.value for kind in KvCacheDtype],
        default=[KvCacheDtype.AUTO.value, KvCacheDtype.FP8_E4M3.value, KvCacheDtype.FP8_E5M2.value],
        help="of KV pages, with each dtype of weights (default auto fp8_e4m3 fp8_e5m2; auto is that of the weights)",
    )
    add_device_flag(parser)
    parser.add_argument(
        "--threads", type=non_negative_int, default=0, metavar="N", help="of a CPU; 0 is torch's choice"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of `EngineConfig` except the model and the role."""
    cache = CacheConfig()
    scheduler = SchedulerConfig()
    grammar = GrammarConfig()

    group = parser.add_argument_group("engine")
    add_model_impl_flag(group)
    group.add_argument(
        "--load-format",
        choices=[kind.value for kind in LoadFormat],
        default=LoadFormat.AUTO.value,
        help="where weights come from. auto: the model's safetensors files; dummy: random numbers, to measure the "
        "speed and memory of a model from its config.json alone (default auto)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="weights, and KV unless --kv-cache-dtype says otherwise (default: the checkpoint's; bfloat16 on a GPU)",
    )
    add_quantization_flag(group)
    add_device_flag(group)
    _add_graph_flags(group)
    group.add_argument(
        "--threads",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="CPU threads of one engine, shared by its ranks; 0 leaves torch's choice",
    )
    group.add_argument(
        "--cpu-affinity",
        default=AUTO_AFFINITY,
        metavar="CPUS",
        help="cores that the threads that compute stay on, such as 0-3,8; none: wherever the system puts them; auto: "
        "cores of its own for each worker of a `tandem up` of several, where there are enough, else as none (default "
        "auto)",
    )
    _add_parallel_flags(parser)

    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--page-size",
        type=positive_int,
        default=cache.page_size,
        metavar="N",
        help=f"tokens per KV page (default {cache.page_size})",
    )
    add_kv_cache_dtype_flag(group)
    group.add_argument(
        "--kv-cache-gib",
        type=positive_float,
        metavar="GIB",
        help=f"memory for KV pages, of each rank (default {cache.kv_bytes / GIB:g})",
    )
    group.add_argument(
        "--num-pages",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="number of KV pages, instead of a size",
    )
    group.add_argument(
        "--mem-fraction-static",
        "--gpu-memory-utilization",
        type=positive_float,
        metavar="SHARE",
        help="share of the memory of the device (on a CPU: of what this process may have) for this engine in all; a "
        "step at its largest is run at start, and what it and the weights leave becomes KV pages. `tandem up` "
        "divides it among its workers",
    )
    group.add_argument(
        "--session-kv-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="KV that conversations may keep between their turns (default a quarter of the pages)",
    )
    group.add_argument(
        "--session-ttl",
        type=float,
        default=scheduler.session_ttl,
        metavar="S",
        help=f"seconds that an unused conversation is kept (default {scheduler.session_ttl:g})",
    )
    group.add_argument(
        "--max-sessions",
        type=positive_int,
        default=scheduler.max_sessions,
        metavar="N",
        help=f"conversations kept at a time (default {scheduler.max_sessions})",
    )
    group.add_argument("--disable-radix-cache", action="store_true", help="do not keep prefixes for reuse")

    _add_host_flags(parser)

    group = parser.add_argument_group("scheduler")
    group.add_argument(
        "--context-length",
        "--max-model-len",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="longest prompt + output (default: the model's, at most 4096)",
    )
    group.add_argument(
        "--max-running-requests",
        type=positive_int,
        default=scheduler.max_running_requests,
        metavar="N",
        help=f"sequences decoded together (default {scheduler.max_running_requests})",
    )
    group.add_argument(
        "--max-queued-requests",
        type=positive_int,
        default=scheduler.max_queued_requests,
        metavar="N",
        help=f"waiting requests before new ones are refused (default {scheduler.max_queued_requests})",
    )
    group.add_argument(
        "--max-tokens-per-step",
        "--max-num-batched-tokens",
        type=non_negative_int,
        default=scheduler.max_tokens_per_step,
        metavar="N",
        help="tokens computed in one step: one for each running request, the rest for prompts; must be above "
        "--max-running-requests, so that neither starves (default: --max-prefill-tokens + --max-running-requests)",
    )
    group.add_argument(
        "--max-prefill-tokens",
        type=positive_int,
        default=scheduler.max_prefill_tokens,
        metavar="N",
        help=f"prompt tokens computed in one step (default {scheduler.max_prefill_tokens})",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=positive_int,
        default=scheduler.chunked_prefill_size,
        metavar="N",
        help=f"prompt tokens of one request in one step (default {scheduler.chunked_prefill_size})",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=non_negative_int,
        default=scheduler.long_prefill_token_threshold,
        metavar="N",
        help="while others decode, compute only N tokens per step of a prompt that has more left, so that their "
        "tokens keep coming (default 0: the chunk size alone bounds it)",
    )
    _add_policy_flags(group, scheduler)
    group.add_argument("--disable-mixed-chunk", action="store_true", help="never decode in a step that prefills")
    group.add_argument("--disable-overlap-schedule", action="store_true", help="schedule only when no step computes")
    group.add_argument(
        "--audit-every-step", action="store_true", help="check page conservation after every step (slow)"
    )
    group.add_argument(
        "--preemption-mode",
        choices=[mode.value for mode in PreemptionMode],
        default=scheduler.preemption_mode.value,
        help="what becomes of the KV of a request that has to give way: recompute it, swap it to host memory, or "
        "whichever is predicted to be cheaper (default auto; swapping needs --swap-space)",
    )
    group.add_argument("--force-retract-every", type=non_negative_int, default=0, help=argparse.SUPPRESS)
    group.add_argument("--force-fault-every", type=non_negative_int, default=0, help=argparse.SUPPRESS)

    group = parser.add_argument_group("operation")
    group.add_argument(
        "--watchdog-timeout",
        type=positive_float,
        default=scheduler.watchdog_timeout,
        metavar="S",
        help="seconds after which a step that has not come back counts as hung: stacks, queues and pages are written "
        f"down and the worker falls silent, so that it is restarted (default {scheduler.watchdog_timeout:g})",
    )
    group.add_argument(
        "--crash-dump-folder",
        default="",
        metavar="DIR",
        help="where the state of a hang is written, one file per engine (default: to its log)",
    )
    group.add_argument(
        "--torch-profiler-dir",
        default="",
        metavar="DIR",
        help="allow traces of running steps on demand (`tandem ctl profile`), written here as Chrome traces",
    )

    _add_speculative_flags(parser)

    _add_transfer_flags(parser)

    group = parser.add_argument_group("structured output")
    group.add_argument(
        "--grammar-backend",
        choices=("llguidance", "none"),
        default=grammar.backend,
        help="what holds outputs to a JSON schema, regex or grammar; none refuses such requests (default llguidance)",
    )
    group.add_argument(
        "--grammar-compile-timeout",
        type=float,
        default=grammar.compile_timeout,
        metavar="S",
        help=f"CPU seconds one grammar may take to compile before it is refused (default {grammar.compile_timeout:g})",
    )
    group.add_argument(
        "--grammar-cache-size",
        type=positive_int,
        default=grammar.cache_size,
        metavar="N",
        help=f"compiled grammars kept for later requests (default {grammar.cache_size})",
    )


def _add_policy_flags(group: argparse._ArgumentGroup, scheduler: SchedulerConfig) -> None:
    """Who is admitted next, and when (docs/scheduling.md)."""
    group.add_argument(
        "--schedule-policy",
        "--scheduling-policy",
        choices=[policy.value for policy in SchedulePolicy],
        default=scheduler.schedule_policy.value,
        help="which waiting request goes next: first come (fcfs), longest cached prefix (lpm), most requests with "
        "the same cached prefix (dfs-weight), greatest priority (priority), fewest steps left (srf); default "
        f"{scheduler.schedule_policy.value}",
    )
    group.add_argument(
        "--policy-ageing-seconds",
        type=float,
        default=scheduler.policy_ageing_seconds,
        metavar="S",
        help="a request that has waited S seconds goes first, whatever the policy; under priority it gains one "
        f"level every S seconds instead (default {scheduler.policy_ageing_seconds:g})",
    )
    group.add_argument(
        "--priority-preemption-threshold",
        "--priority-scheduling-preemption-threshold",
        type=positive_int,
        default=scheduler.priority_preemption_threshold,
        metavar="N",
        help="under priority, a waiting request may put back a running one whose priority is lower by N or more "
        f"(default {scheduler.priority_preemption_threshold})",
    )
    group.add_argument(
        "--watermark",
        type=float,
        default=scheduler.watermark,
        metavar="X",
        help=f"share of KV pages that new requests leave free for running ones to grow (default {scheduler.watermark})",
    )


def _add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    spec = SpecConfig()
    group = parser.add_argument_group(
        "speculative decoding", "Guess tokens cheaply and verify several in one step. Never changes an output."
    )
    group.add_argument(
        "--speculative-algorithm",
        choices=[algorithm.value for algorithm in SpecAlgorithm],
        help="who guesses: NGRAM repeats what followed the same words before (best where outputs quote their "
        "input); DRAFT asks a smaller model; EAGLE a head trained on this model's hidden states (default: nobody)",
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        default=spec.draft_model_path,
        metavar="PATH",
        help="checkpoint folder for DRAFT, a model with the same tokenizer, or for EAGLE, a head",
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=positive_int,
        default=spec.num_draft_tokens,
        metavar="N",
        help=f"guesses per request and step at most (default {spec.num_draft_tokens}); fewer where few are right",
    )
    group.add_argument(
        "--ngram-prompt-lookup-min",
        type=positive_int,
        default=spec.prompt_lookup_min,
        metavar="N",
        help=f"tokens that must repeat before NGRAM guesses (default {spec.prompt_lookup_min})",
    )
    group.add_argument(
        "--ngram-prompt-lookup-max",
        type=positive_int,
        default=spec.prompt_lookup_max,
        metavar="N",
        help=f"tokens by which NGRAM picks the best of several repetitions (default {spec.prompt_lookup_max})",
    )
    group.add_argument(
        "--speculative-disable-by-batch-size",
        type=non_negative_int,
        default=spec.disable_by_batch_size,
        metavar="N",
        help="no guesses in steps with more running requests than this; 0 is no bound (default 0)",
    )
    group.add_argument(
        "--speculative-disable-adaptive",
        action="store_true",
        help="always guess the greatest number, however few are right",
    )


def _spec_config(args: argparse.Namespace) -> SpecConfig:
    algorithm = args.speculative_algorithm
    return SpecConfig(
        algorithm=None if algorithm is None else SpecAlgorithm(algorithm),
        draft_model_path=args.speculative_draft_model_path,
        num_draft_tokens=args.speculative_num_draft_tokens,
        prompt_lookup_min=args.ngram_prompt_lookup_min,
        prompt_lookup_max=args.ngram_prompt_lookup_max,
        disable_by_batch_size=args.speculative_disable_by_batch_size,
        adaptive=not args.speculative_disable_adaptive,
    )


def _add_parallel_flags(parser: argparse.ArgumentParser) -> None:
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
        "N must divide the attention heads and the intermediate size; workers with different N exchange KV (default 1)",
    )
    group.add_argument(
        "--nnodes",
        type=positive_int,
        default=parallel.nnodes,
        metavar="N",
        help="machines that these processes run on, as many on each. Start the same `tandem worker` on all of them, "
        "with its own --node-rank and --host (default 1)",
    )
    group.add_argument(
        "--node-rank",
        type=non_negative_int,
        default=parallel.node_rank,
        metavar="R",
        help="which of the machines this is. 0 is the worker; the others only compute for it (default 0)",
    )
    group.add_argument(
        "--dist-init-addr",
        default=parallel.dist_init_addr,
        metavar="HOST:PORT",
        help="where machine 0 awaits the others; it listens on that port of its --host",
    )
    group.add_argument(
        "--dist-init-timeout",
        type=float,
        default=parallel.init_timeout,
        metavar="S",
        help=f"seconds that machines wait for each other at start (default {parallel.init_timeout:g})",
    )
    group.add_argument(
        "--dist-timeout",
        type=float,
        default=parallel.timeout,
        metavar="S",
        help="seconds that these processes wait for each other, at start and within a step, before the engine "
        f"gives up (default {parallel.timeout:g})",
    )


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    host = HostConfig()
    group = parser.add_argument_group("KV cache below the device")
    group.add_argument(
        "--enable-hierarchical-cache",
        action="store_true",
        help="keep prefixes in host memory that the KV pool has no room for, and copy them back when a request "
        "begins with them",
    )
    group.add_argument(
        "--hicache-ratio",
        type=float,
        default=host.ratio,
        metavar="R",
        help=f"host memory for them, as a multiple of the KV pool (default {host.ratio:g})",
    )
    group.add_argument(
        "--hicache-size",
        type=float,
        default=0.0,
        metavar="GIB",
        help="host memory for them in GiB; overrides --hicache-ratio",
    )
    group.add_argument(
        "--hicache-write-policy",
        choices=[policy.value for policy in WritePolicy],
        default=host.write_policy.value,
        help="when a prefix is copied to host memory: as soon as it is cached, once it was used a second time, or "
        f"when the pool evicts it (default {host.write_policy.value})",
    )
    group.add_argument(
        "--hicache-storage-dir",
        default=host.storage_dir,
        metavar="DIR",
        help="also keep prefixes in files here; they survive a restart. Needs --tensor-parallel-size 1 "
        "(default: nowhere)",
    )
    group.add_argument(
        "--hicache-storage-size",
        type=float,
        default=host.storage_bytes / GIB,
        metavar="GIB",
        help=f"bytes of those files; the least recently used go first (default {host.storage_bytes / GIB:g})",
    )
    group.add_argument(
        "--hicache-storage-prefetch-timeout",
        type=float,
        default=host.prefetch_timeout,
        metavar="S",
        help="seconds that a request waits at most for its prefix to be read from files; what has not come by then "
        f"is computed (default {host.prefetch_timeout:g})",
    )
    group.add_argument(
        "--swap-space",
        type=float,
        default=0.0,
        metavar="GIB",
        help="host memory kept for the KV of requests that have to give way (default 0: they are recomputed)",
    )


def _host_config(args: argparse.Namespace) -> HostConfig:
    return HostConfig(
        enable_cache=args.enable_hierarchical_cache,
        ratio=args.hicache_ratio,
        size_bytes=_gib("--hicache-size", args.hicache_size),
        write_policy=WritePolicy(args.hicache_write_policy),
        storage_dir=args.hicache_storage_dir,
        storage_bytes=_gib("--hicache-storage-size", args.hicache_storage_size),
        prefetch_timeout=args.hicache_storage_prefetch_timeout,
        swap_bytes=_gib("--swap-space", args.swap_space),
    )


def _gib(flag: str, value: float) -> int:
    """Bytes. Raises `ConfigError` for what is no size."""
    if not math.isfinite(value):
        raise ConfigError(f"{flag} must be a finite number of GiB, got {value}")
    return int(value * GIB)


def _cpus(affinity: str) -> tuple[int, ...]:
    """Raises `ConfigError` for cores that this process may not use."""
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
        cpus=_cpus(args.cpu_affinity),
        cache=CacheConfig(
            page_size=args.page_size,
            dtype=KvCacheDtype(args.kv_cache_dtype),
            num_pages=args.num_pages,
            kv_cache_bytes=int((args.kv_cache_gib or 0) * GIB),
            mem_fraction_static=args.mem_fraction_static or 0.0,
            session_bytes=int(args.session_kv_gib * GIB),
            enable_prefix_cache=not args.disable_radix_cache,
            host=_host_config(args),
        ),
        context_length=args.context_length,
        scheduler=SchedulerConfig(
            enable_mixed_chunk=not args.disable_mixed_chunk,
            enable_overlap=not args.disable_overlap_schedule,
            audit_every_step=args.audit_every_step,
            preemption_mode=PreemptionMode(args.preemption_mode),
            force_retract_every=args.force_retract_every,
            schedule_policy=SchedulePolicy(args.schedule_policy),
            force_fault_every=args.force_fault_every,
            watchdog_timeout=args.watchdog_timeout,
            **{name: getattr(args, name) for name in _SCHEDULER_FLAGS},
        ),
        disagg=DisaggConfig(
            role=Role(args.role),
            transport=args.transport,
            peer_group=args.peer_group,
            grant_timeout=args.grant_timeout,
            hold_timeout=args.hold_timeout,
            prefix_fetch_timeout=args.prefix_fetch_timeout,
            kv_digest=DigestKind(args.kv_digest),
            expect_transport=None if args.expect_transport == "any" else LinkTransport(args.expect_transport),
            link_probe_mib=args.link_probe_mib,
            kv_push_layers=args.kv_push_layers,
        ),
        speculative=_spec_config(args),
        parallel=ParallelConfig(
            tp_size=args.tensor_parallel_size,
            timeout=args.dist_timeout,
            nnodes=args.nnodes,
            node_rank=args.node_rank,
            dist_init_addr=args.dist_init_addr,
            init_timeout=args.dist_init_timeout,
        ),
        grammar=GrammarConfig(
            backend=args.grammar_backend,
            compile_timeout=args.grammar_compile_timeout,
            cache_size=args.grammar_cache_size,
        ),
        graphs=GraphConfig(
            enabled=not args.disable_cuda_graph,
            max_rows=args.cuda_graph_max_bs,
            sizes=tuple(args.cuda_graph_bs),
        ),
        operation=OperationConfig(torch_profiler_dir=args.torch_profiler_dir, crash_dump_folder=args.crash_dump_folder),
    )


def engine_argv(args: argparse.Namespace) -> list[str]:
    """The flags again, as arguments for a child process that uses the same table."""
    return _argv(args, add_engine_flags)


def accuracy_argv(args: argparse.Namespace) -> list[str]:
    """As `engine_argv`, of `tandem accuracy`."""
    return _argv(args, add_accuracy_flags)


def _argv(args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    argv: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        argv.append(action.option_strings[0])
        if isinstance(value, list):
            argv += map(str, value)
        elif action.nargs != 0:
            argv.append(str(value))
    return argv


def _add_transfer_flags(parser: argparse.ArgumentParser) -> None:
    disagg = DisaggConfig()
    group = parser.add_argument_group("KV transfer")
    group.add_argument(
        "--transport",
        choices=("nixl", "none"),
        default=disagg.transport,
        help="none serves alone, without NIXL (default nixl)",
    )
    group.add_argument(
        "--peer-group",
        default=disagg.peer_group,
        metavar="NAME",
        help="exchange KV only with workers of the same group, beyond those of equal weights and layout; for two "
        "releases side by side (default: all are of one group)",
    )
    group.add_argument(
        "--grant-timeout",
        type=float,
        default=disagg.grant_timeout,
        metavar="S",
        help=f"seconds decode waits for a silent prefill worker (default {disagg.grant_timeout:g})",
    )
    group.add_argument(
        "--hold-timeout",
        type=float,
        default=disagg.hold_timeout,
        metavar="S",
        help=f"seconds prefill keeps finished pages for a silent decode worker (default {disagg.hold_timeout:g})",
    )

    group.add_argument(
        "--prefix-fetch-timeout",
        type=float,
        default=disagg.prefix_fetch_timeout,
        metavar="S",
        help="seconds a prompt waits at most for a prefix that another worker has cached, where the gateway has found "
        f"that cheaper than to compute it (default {disagg.prefix_fetch_timeout:g})",
    )
    group.add_argument(
        "--kv-digest",
        choices=tuple(DigestKind),
        default=disagg.kv_digest,
        help="proof that decode asks of pages it is sent: sampled sees missed, torn, stale and foreign pages at about "
        "2%% of a long transfer's time; full covers every byte, flipped bits too, at about the transfer's time again "
        f"(default {disagg.kv_digest})",
    )
    group.add_argument(
        "--kv-push-layers",
        type=non_negative_int,
        default=disagg.kv_push_layers,
        metavar="N",
        help="prefill sends pages N layers at a time while later layers compute; 0 waits for the end of each chunk "
        "(default: as many as make 2 MiB; a chunk with less waits for its end and goes in one shot)",
    )
    group.add_argument(
        "--expect-transport",
        choices=("any", *(each.value for each in LinkTransport if each is not LinkTransport.UNKNOWN)),
        default="any",
        help="warn, in the log, statistics and registry, about links to peers that are known to be carried by "
        "something slower; order: tcp, rdma, shm, cuda_ipc (default any)",
    )
    group.add_argument(
        "--link-probe-mib",
        type=non_negative_int,
        default=disagg.link_probe_mib,
        metavar="MIB",
        help="largest write when the link to a peer is measured, at its start and every ten minutes without traffic; "
        f"0 measures only what requests move (default {disagg.link_probe_mib})",
    )
