"""The paged KV pool, and what stays in it between requests."""

import argparse

from tandem_engine.config import CacheConfig, KvCacheDtype, SchedulerConfig
from tandem_engine.config.cache import DEFAULT_ACCELERATOR_SHARE
from tandem_engine.flags.host import host_config
from tandem_engine.flags.shared import add_kv_cache_dtype_flag
from tandem_engine.flags.values import GIB, bytes_of, non_negative_int, positive_float, positive_int


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    cache = CacheConfig()
    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--page-size",
        "--block-size",
        type=positive_int,
        metavar="N",
        help=f"tokens per KV page (default: {cache.page_size}; 64 on a GPU)",
    )
    add_kv_cache_dtype_flag(group)
    group.add_argument(
        "--kv-cache-gib",
        type=positive_float,
        metavar="GIB",
        help=f"memory for KV pages of each rank, in GiB (default: {cache.kv_bytes / GIB:g} on a CPU)",
    )
    group.add_argument(
        "--num-pages",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="number of KV pages, instead of --kv-cache-gib",
    )
    group.add_argument(
        "--mem-fraction-static",
        "--gpu-memory-utilization",
        type=positive_float,
        metavar="SHARE",
        help="share of the device's memory for this engine (on a CPU: of the memory available to the process). The "
        "engine runs its largest step at start; the rest, without this step and the weights, becomes KV pages. "
        "`tandem up` divides the share among its workers (default: on a GPU "
        f"{DEFAULT_ACCELERATOR_SHARE:g}, unless a size is set; on a CPU --kv-cache-gib)",
    )
    _add_session_flags(group)
    group.add_argument("--disable-radix-cache", action="store_true", help="disable the prefix cache")


def _add_session_flags(group: argparse._ArgumentGroup) -> None:
    """Conversations, whose KV stays between their turns."""
    scheduler = SchedulerConfig()
    group.add_argument(
        "--session-kv-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="KV in GiB that sessions may keep between their turns (default: a quarter of the pages)",
    )
    group.add_argument(
        "--session-ttl",
        type=float,
        default=scheduler.session_ttl,
        metavar="S",
        help=f"seconds that an idle session is kept (default: {scheduler.session_ttl:g})",
    )
    group.add_argument(
        "--max-sessions",
        type=positive_int,
        default=scheduler.max_sessions,
        metavar="N",
        help=f"sessions kept at a time (default: {scheduler.max_sessions})",
    )


def cache_config(args: argparse.Namespace) -> CacheConfig:
    return CacheConfig(
        page_size=args.page_size or CacheConfig().page_size,
        dtype=KvCacheDtype(args.kv_cache_dtype),
        num_pages=args.num_pages,
        kv_cache_bytes=int((args.kv_cache_gib or 0) * GIB),
        mem_fraction_static=args.mem_fraction_static or 0.0,
        session_bytes=bytes_of("--session-kv-gib", args.session_kv_gib),
        enable_prefix_cache=not args.disable_radix_cache,
        host=host_config(args),
    )
