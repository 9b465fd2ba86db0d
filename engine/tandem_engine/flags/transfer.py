"""KV between prefill and decode workers."""

import argparse

from tandem_engine.config import DisaggConfig, Role
from tandem_engine.flags.values import non_negative_int
from tandem_engine.names import DigestKind, LinkTransport


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
        help="exchange KV only with workers of the same group, beyond those of equal weights and layout; for two "
        "releases side by side (default: all are of one group)",
    )
    group.add_argument(
        "--grant-timeout",
        type=float,
        default=disagg.grant_timeout,
        metavar="S",
        help=f"seconds decode waits for a silent prefill worker (default: {disagg.grant_timeout:g})",
    )
    group.add_argument(
        "--hold-timeout",
        type=float,
        default=disagg.hold_timeout,
        metavar="S",
        help=f"seconds prefill keeps finished pages for a silent decode worker (default: {disagg.hold_timeout:g})",
    )

    group.add_argument(
        "--prefix-fetch-timeout",
        type=float,
        default=disagg.prefix_fetch_timeout,
        metavar="S",
        help="seconds a prompt waits at most for a prefix that another worker has cached, where the gateway has found "
        f"that cheaper than to compute it (default: {disagg.prefix_fetch_timeout:g})",
    )
    group.add_argument(
        "--kv-digest",
        choices=tuple(DigestKind),
        default=disagg.kv_digest,
        help="digest that decode requires of received pages. sampled: detects missed, torn, stale, foreign pages, at "
        "about 2%% of a long transfer's time; full: covers every byte, also flipped bits, at about the transfer's "
        f"time again (default: {disagg.kv_digest})",
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
        "something slower; order: tcp, rdma, shm, cuda_ipc (default: any)",
    )
    group.add_argument(
        "--link-probe-mib",
        type=non_negative_int,
        default=disagg.link_probe_mib,
        metavar="MIB",
        help="largest write when the link to a peer is measured, at its start and every ten minutes without traffic; "
        f"0 measures only what requests move (default: {disagg.link_probe_mib})",
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
