"""What `tandem` and `kubectl tandem` share: the argument parser, and errors as one sentence.

Expected errors end as one sentence on stderr and an exit status:

    0 success    1 the command ran and the result is negative    2 wrong usage    3 cannot start or continue
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.base.extras import lacking
from tandem_services.common.errors import ServiceError
from tandem_services.common.settings import read_settings


class HelpText(argparse.RawDescriptionHelpFormatter):
    """Examples stay as they are written; a description, which is one line however long, is wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class TeachingParser(argparse.ArgumentParser):
    """argparse without abbreviations, naming the nearest flag or command when one is misspelt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpText)
        super().__init__(*args, **kwargs)
        # Of nested commands the innermost counts: what is wrong is told by the parser that knows its flags.
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        hint = self._nearest(message)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")

    def _nearest(self, message: str) -> str:
        if message.startswith("argument ") and "invalid choice" not in message:
            return ""  # The flag is right, and its value is no misspelt word.
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


def run_command(build: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    """Parse and run; returns the exit status."""
    try:
        for warning in read_settings().warnings:
            print(f"tandem: warning: {warning}", file=sys.stderr)
        args, unknown = build().parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except ConfigError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 2
    except (EngineError, ServiceError) as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 3
    except (ModuleNotFoundError, OSError) as error:
        sentence = lacking(error)
        if sentence is None:
            raise
        print(f"tandem: error: {sentence}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
