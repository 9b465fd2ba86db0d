"""`tandem`: one command for everything a person does with Tandem.

Each subcommand is a module with `add_parser` (cheap: argparse alone, so that `--help` is instant) and
`run` (imports what it needs).
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tandem_services.cli import (
    accuracy,
    bench,
    chat,
    ctl,
    gateway,
    keys,
    quarantine,
    router,
    simulate,
    up,
    verify,
    worker,
)
from tandem_services.cli.entry import TeachingParser, run_command
from tandem_services.cli.k8s import command as k8s

COMMANDS = (up, chat, bench, verify, accuracy, simulate, gateway, router, worker, ctl, k8s, quarantine, keys)

EPILOG = """\
first steps:
  tandem up                          start everything on this machine with the bundled model
  tandem chat                        talk to it (in a second terminal)
  tandem verify --quick              prove that outputs equal transformers, token by token
  tandem accuracy                    what KV and weights of fewer bits cost, on a text
  tandem bench serve --help          measure a running server
  tandem k8s --help                  look at deployments on Kubernetes, and give orders
  tandem simulate --help             replay a trace against the router, without a GPU

`tandem COMMAND --help` explains each command with examples.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = TeachingParser(
        prog="tandem",
        description="Serve large language models with prefill and decode in separate workers.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"tandem {version('tandem')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=TeachingParser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(build_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
