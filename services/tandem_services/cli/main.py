"""`tandem`: one command for everything a person does with Tandem.

Each subcommand is a module with `add_parser` (cheap: argparse alone, so that `--help` is instant) and
`run` (imports what it needs). Those of `tandem_lab`, which compare and measure, are found where it is installed.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from tandem_engine.base.release import install_hint, product_version
from tandem_services.cli import ctl, gateway, kernels, keys, quarantine, router, runs, serve, up, version, worker
from tandem_services.cli.chat import command as chat
from tandem_services.cli.doctor import command as doctor
from tandem_services.cli.entry import TeachingParser, run_command
from tandem_services.cli.k8s import command as k8s
from tandem_services.cli.models import command as models
from tandem_services.cli.parsing import completion
from tandem_services.common.errors import StartupError

LAB = ("bench", "verify", "accuracy", "simulate", "size")
"""Commands of `tandem_lab`: an image that only serves has no lab."""
COMMANDS: tuple[ModuleType | str, ...] = (
    serve,
    models,
    up,
    runs,
    doctor,
    chat,
    *LAB,
    gateway,
    router,
    worker,
    ctl,
    k8s,
    quarantine,
    keys,
    completion,
    version,
    kernels,
)

EPILOG = """\
first steps:
  tandem serve                       serve the bundled model on this machine
  tandem serve Qwen/Qwen3-0.6B       serve a model of the Hugging Face hub
  tandem chat                        talk to it (in a second terminal)
  tandem verify --quick              prove that outputs equal transformers, token by token
  tandem accuracy                    what KV and weights of fewer bits cost, on a text
  tandem bench serve --help          measure a running server
  tandem k8s --help                  look at deployments on Kubernetes, and give orders
  tandem simulate --help             replay a trace against the router, without a GPU
  tandem size --help                 find the cheapest fleet for a load and its latency objectives

`tandem COMMAND --help` explains each command with examples.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = TeachingParser(
        prog="tandem",
        description="Serve large language models with prefill and decode in separate workers.",
        epilog=EPILOG,
    )
    parser.set_defaults(root=parser)
    parser.add_argument("--version", action="version", version=f"tandem {product_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=TeachingParser)
    for command in COMMANDS:
        if isinstance(command, ModuleType):
            command.add_parser(commands)
        elif find_spec("tandem_lab") is None:
            missing = commands.add_parser(command, help="not installed", add_help=False, prefix_chars="\0")
            missing.add_argument("options", nargs="*")  # whatever they are
            missing.set_defaults(run=_no_lab)
        else:
            import_module(f"tandem_lab.cli.{command}").add_parser(commands)
    return parser


def _no_lab(_: argparse.Namespace) -> int:
    raise StartupError(f"tandem_lab is not installed here: {install_hint('lab')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(build_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
