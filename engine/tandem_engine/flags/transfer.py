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
        "chunks (default: as many as make 2 MiB; a chunk with less KV is sent when it is complete)",
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
        type=non_negative_int,
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
