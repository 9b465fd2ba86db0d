"""Flags of the paged KV pool, of what stays in it between requests, of host memory, and of KV transfer."""

import argparse

from tandem_engine.base.names import DigestKind, LinkTransport
from tandem_engine.config import CacheConfig, DisaggConfig, HostConfig, KvCacheDtype, Role, SchedulerConfig, WritePolicy
from tandem_engine.config.cache import DEFAULT_ACCELERATOR_SHARE
from tandem_engine.config.flags.types import (
    GIB,
    add_kv_cache_dtype_flag,
    bytes_of,
    count,
    gib,
    mib,
    non_negative_int,
    positive_count,
    positive_float,
    positive_gib,
    positive_int,
)


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    host = HostConfig()
    group = parser.add_argument_group("KV cache below the device")
    group.add_argument(
        "--enable-hierarchical-cache",
        action="store_true",
        help="keep cached prefixes in host memory when the KV pool evicts them, and copy them back for requests "
        "that start with them",
    )
    group.add_argument(
        "--hicache-ratio",
        type=float,
        default=host.ratio,
        metavar="R",
        help=f"size of the host tier as a multiple of the KV pool (default: {host.ratio:g})",
    )
    group.add_argument(
        "--hicache-size",
        type=gib,
        default=0.0,
        metavar="GIB",
        help="size of the host tier in GiB; overrides --hicache-ratio",
    )
    group.add_argument(
        "--hicache-write-policy",
        choices=[policy.value for policy in WritePolicy],
        default=host.write_policy.value,
        help="time at which a prefix is copied to host memory. write_through: as soon as it is cached; "
        "write_through_selective: at its second use; write_back: when the pool evicts it (default: "
        f"{host.write_policy.value})",
    )
    group.add_argument(
        "--hicache-storage-dir",
        default=host.storage_dir,
        metavar="DIR",
        help="directory of the disk tier, whose prefixes survive a restart. Requires --tensor-parallel-size 1 "
        "(default: no disk tier)",
    )
    group.add_argument(
        "--hicache-storage-size",
        type=gib,
        default=host.storage_bytes / GIB,
        metavar="GIB",
        help="size of the disk tier in GiB; the least recently used blocks are evicted first (default: "
        f"{host.storage_bytes / GIB:g})",
    )
    group.add_argument(
        "--hicache-storage-prefetch-timeout",
        type=float,
        default=host.prefetch_timeout,
        metavar="S",
        help="maximum wait of a request for its prefix to be read from files, in seconds; the rest is computed "
        f"(default: {host.prefetch_timeout:g})",
    )
    group.add_argument(
        "--swap-space",
        type=gib,
        default=0.0,
        metavar="GIB",
        help="host memory in GiB for the KV of retracted requests (default: 0, which recomputes them)",
    )


def host_config(args: argparse.Namespace) -> HostConfig:
    return HostConfig(
        enable_cache=args.enable_hierarchical_cache,
        ratio=args.hicache_ratio,
        size_bytes=bytes_of("--hicache-size", args.hicache_size),
        write_policy=WritePolicy(args.hicache_write_policy),
        storage_dir=args.hicache_storage_dir,
        storage_bytes=bytes_of("--hicache-storage-size", args.hicache_storage_size),
        prefetch_timeout=args.hicache_storage_prefetch_timeout,
        swap_bytes=bytes_of("--swap-space", args.swap_space),
    )


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
        type=positive_gib,
        metavar="GIB",
        help=f"memory for KV pages of each rank, in GiB (default: {cache.kv_bytes / GIB:g} on a CPU)",
    )
    group.add_argument(
        "--num-pages",
        type=count,
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
        type=gib,
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
        type=positive_count,
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


def add_transfer_flags(parser: argparse.ArgumentParser) -> None:
    disagg = DisaggConfig()
    group = parser.add_argument_group("KV transfer")
    group.add_argument(
        "--transport",
        choices=("nixl", "none"),
        default=disagg.transport,
        help="KV transport; none runs the worker without peers and without NIXL (default: nixl)",
    )
    group.add_argument(
        "--peer-group",
        default=disagg.peer_group,
        metavar="NAME",
        help="exchange KV only with workers of the same group, in addition to equal weights and layout; separates "
        "two releases (default: one group for all workers)",
    )
    group.add_argument(
        "--grant-timeout",
        type=float,
        default=disagg.grant_timeout,
        metavar="S",
        help="timeout of a decode worker for an unresponsive prefill worker, in seconds (default: "
        f"{disagg.grant_timeout:g})",
    )
    group.add_argument(
        "--hold-timeout",
        type=float,
        default=disagg.hold_timeout,
        metavar="S",
        help="seconds a prefill worker keeps computed pages for an unresponsive decode worker (default: "
        f"{disagg.hold_timeout:g})",
    )

    group.add_argument(
        "--prefix-fetch-timeout",
        type=float,
        default=disagg.prefix_fetch_timeout,
        metavar="S",
        help="timeout of a prefix fetch, in seconds; then the prompt is computed. The gateway requests a fetch if it "
        f"is predicted to be faster than computing the prefix (default: {disagg.prefix_fetch_timeout:g})",
    )
    group.add_argument(
        "--kv-digest",
        choices=tuple(DigestKind),
        default=disagg.kv_digest,
        help="digest that a decode worker requires of received pages. sampled: detects missed, torn, stale and foreign "
        "pages, takes about 2%% of a long transfer's time; full: covers every byte and detects flipped bits, takes "
        f"about as long as the transfer (default: {disagg.kv_digest})",
    )
    group.add_argument(
        "--kv-push-layers",
        type=non_negative_int,
        default=disagg.kv_push_layers,
        metavar="N",
        help="number of layers that a prefill worker sends at a time while later layers compute; 0: send complete "
        "chunks (default: as many as make 2 MiB, on a GPU 32; a chunk with less KV is sent when it is complete)",
    )
    group.add_argument(
        "--expect-transport",
        choices=("any", *(each.value for each in LinkTransport if each is not LinkTransport.UNKNOWN)),
        default="any",
        help="report links to peers that use a slower transport, in the log, statistics and registry. From slow to "
        "fast: tcp, rdma, shm, cuda_ipc (default: any, which reports none)",
    )
    group.add_argument(
        "--link-probe-mib",
        type=mib,
        default=disagg.link_probe_mib,
        metavar="MIB",
        help="largest write of a link test in MiB. The link to a peer is tested when it is set up, and after ten "
        f"minutes without traffic; 0: measure only transfers of requests (default: {disagg.link_probe_mib})",
    )


def transfer_config(args: argparse.Namespace) -> DisaggConfig:
    return DisaggConfig(
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
    )
