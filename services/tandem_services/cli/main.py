"""`tandem`: one command for everything a person does with Tandem.

Each subcommand is a module with `add_parser` (cheap: argparse alone, so that `--help` is instant) and
`run` (imports what it needs). Errors made on purpose end as one sentence on stderr and an exit status:

    0 success    1 the command ran and the answer is no    2 wrong usage    3 cannot start or go on
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from tandem_engine.errors import ConfigError, EngineError
from tandem_services.cli import bench, chat, ctl, gateway, keys, quarantine, router, simulate, up, verify, worker
from tandem_services.common.errors import ServiceError
from tandem_services.common.settings import read_settings

COMMANDS = (up, chat, bench, verify, simulate, gateway, router, worker, ctl, quarantine, keys)

EPILOG = """\
first steps:
  tandem up                          start everything on this machine with the bundled model
  tandem chat                        talk to it (in a second terminal)
  tandem verify --quick              prove that outputs equal transformers, token by token
  tandem bench serve --help          measure a running server
  tandem simulate --help             replay a trace against the router, without a GPU

`tandem COMMAND --help` explains each command with examples.
"""


class TeachingParser(argparse.ArgumentParser):
    """argparse without abbreviations, naming the nearest flag or command when one is misspelt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        hint = self._nearest(message)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")

    def _nearest(self, message: str) -> str:
        words = [word.strip("',:") for word in message.split()]
        known = [option for action in self._actions for option in action.option_strings]
        known += [name for action in self._actions for name in (action.choices or ()) if isinstance(name, str)]
        for word in words:
            if word in known or not word.strip("-"):
                continue
            close = difflib.get_close_matches(word.split("=")[0], known, n=1, cutoff=0.75)
            if close:
                return f" (did you mean {close[0]}?)"
        return ""


def build_parser() -> argparse.ArgumentParser:
    parser = TeachingParser(
        prog="tandem",
        description="Serve large language models with prefill and decode in separate workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tandem {version('tandem')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=TeachingParser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        for warning in read_settings().warnings:
            print(f"tandem: warning: {warning}", file=sys.stderr)
        parser = build_parser()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except ConfigError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 2
    except (EngineError, ServiceError) as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
