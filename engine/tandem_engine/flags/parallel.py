"""How many processes compute an engine, and on which machines."""

import argparse

from tandem_engine.config import ParallelConfig
from tandem_engine.flags.values import non_negative_int, positive_int


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
