"""Flags that several commands have in common, each defined once."""

import argparse
from pathlib import Path

from tandem_engine.flags import non_negative_int


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model and the name it is served under."""
    parser.add_argument("--model", metavar="PATH", help="checkpoint folder (default: the bundled model)")
    parser.add_argument("--served-model-name", metavar="NAME", help="name clients use (default: the folder's)")


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """What the processes of one deployment must agree on."""
    parser.add_argument("--redis-url", required=True, metavar="URL", help="redis://[user:password@]host:port/db")
    add_cluster(parser)
    parser.add_argument(
        "--curve-keys",
        type=Path,
        metavar="FILE",
        help="key file of the deployment; without it only loopback is served",
    )
    parser.add_argument(
        "--log-format", choices=("plain", "json"), default="plain", help="log lines for people or for machines"
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster", default="default", metavar="NAME", help="separates deployments in one Redis (default default)"
    )


def add_local_prefill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--local-prefill-tokens",
        type=non_negative_int,
        default=64,
        metavar="N",
        help="a decode worker with the beginning of a prompt computes up to N more tokens itself (default 64)",
    )
