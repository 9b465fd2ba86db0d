"""KV below the device: prefixes in host memory and files, and swapped requests."""

import argparse

from tandem_engine.config import HostConfig, WritePolicy
from tandem_engine.flags.values import GIB, bytes_of


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
        type=float,
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
        type=float,
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
        type=float,
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
