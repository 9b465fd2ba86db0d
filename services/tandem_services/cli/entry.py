"""What `tandem` and `kubectl tandem` share: the argument parser, and errors as one sentence.

Expected errors end as one sentence on stderr and an exit status:

    0 success    1 the command ran and the result is negative    2 wrong usage    3 cannot start or continue
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.base.extras import lacking
from tandem_services.cli.parsing.flag_table import (
    Resolved,
    Sources,
    add_settings_flags,
    parse_with_settings,
    settings_of,
)
from tandem_services.cli.parsing.help_text import matching_help, one_usage_line, short_help
from tandem_services.cli.parsing.hints import hint_for
from tandem_services.common.errors import ServiceError
from tandem_services.common.settings import CONFIG_VARIABLE, forget_variables, read_settings


class HelpText(argparse.RawDescriptionHelpFormatter):
    """Examples stay as they are written; a description, which is one line however long, is wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class _Help(argparse._HelpAction):
    """`--help`, and `--help=WORD` for a command, a group of flags, a flag, or flags about a word."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        del dest, kwargs
        super().__init__(option_strings, help="show this help; with WORD what there is about it, and exit")
        self.nargs, self.metavar = "?", "WORD"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        del namespace, option
        print(_help_about(parser, values) if values else _help_of(parser), end="")
        parser.exit(0)


def _help_of(parser: argparse.ArgumentParser) -> str:
    common = parser.common if isinstance(parser, TeachingParser) else ()
    return short_help(parser, common) if common else parser.format_help()


def _help_about(parser: argparse.ArgumentParser, word: str) -> str:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and word in action.choices:
            return _help_of(action.choices[word])
    found = matching_help(parser, word, serves=isinstance(parser, TeachingParser) and parser.serves)
    if found is None:
        parser.error(f"--help={word}: no flag or group of flags is about this")
    return found


class _HelpAll(argparse._HelpAction):
    """`--help-all`, where `--help` shows the common flags alone."""


class TeachingParser(argparse.ArgumentParser):
    """argparse without abbreviations, naming the nearest flag or command when one is misspelt.

    `teach` makes the flags of one settings, with other sources than the command line.
    """

    def __init__(self, *, add_help: bool = True, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpText)
        self.common: tuple[str, ...] = ()
        self.sources: Sources | None = None
        self.serves = False
        super().__init__(add_help=False, **kwargs)
        if add_help:
            self.add_argument("-h", "--help", action=_Help)
        # Of nested commands the innermost counts: its parser has the flags that an error message is about.
        self.set_defaults(parser=self)

    def parse_known_args(  # type: ignore[override]  # argparse's has overloads for a namespace of another class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse; settings that the command line does not give come from environment, file and default."""
        if self.sources is None:
            return super().parse_known_args(args, namespace)
        return parse_with_settings(
            self,
            lambda marked: super(TeachingParser, self).parse_known_args(args, marked),
            namespace or argparse.Namespace(),
            self.sources,
        )

    def error(self, message: str) -> NoReturn:
        """One line of usage, what is wrong, and a hint where there is one; status 2."""
        hint = hint_for(self, message, serves=self.serves)
        self.exit(2, f"{one_usage_line(self)}{self.prog}: error: {message}{hint}\n")


def teach(
    parser: argparse.ArgumentParser,
    *,
    common: Sequence[str],
    check: Callable[[argparse.Namespace], object],
    check_flags: Callable[[argparse.Namespace], object] | None = None,
    plan: Callable[[argparse.Namespace], str] | None = None,
    serves: bool = True,
    sources: Sources = Sources(),  # noqa: B008  immutable
) -> None:
    """Call last: the flags of `parser` become settings, and its `--help` shows `common` alone.

    `check`: raises `ConfigError` for what the command would refuse, and starts nothing; for `--print-config`.
    `check_flags`: the same without a look at any file, for `--check-args`; None: the command has no such flag.
    `plan`: what the command would start, for `--dry-run`; None: it starts nothing but itself.
    `serves`: flags of vLLM and SGLang may be meant where a flag does not exist.
    """
    if not isinstance(parser, TeachingParser):
        raise TypeError(f"{parser.prog} is no TeachingParser")
    parser.common, parser.sources, parser.serves = tuple(common), sources, serves
    parser.set_defaults(check=check, check_flags=check_flags, plan=plan, dry_run=False, check_args=False)
    parser.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")
    add_settings_flags(parser, plans=plan is not None, checks_flags=check_flags is not None)


def variables_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Environment variables that set flags of this command or of its subcommands."""
    found: set[str] = set()
    if isinstance(parser, TeachingParser) and parser.sources is not None:
        found |= {setting.variable for setting in settings_of(parser)} - parser.sources.not_variables
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in dict.fromkeys(action.choices.values()):
                found |= variables_of(nested)
    return frozenset(found)


def _run(args: argparse.Namespace, variables: frozenset[str]) -> int:
    settings: tuple[Resolved, ...] = getattr(args, "settings", ())
    if settings and args.check_args:
        args.check_flags(args)
        return 0
    if settings and args.print_config:
        from tandem_services.cli.parsing.print_config import print_config

        args.check(argparse.Namespace(**vars(args)))
        print_config(args.parser, settings, args.model_names)
        return 0
    if settings:
        forget_variables({CONFIG_VARIABLE, *variables})
    if settings and args.dry_run:
        print(args.plan(args), end="")
        return 0
    return int(args.run(args))


def run_command(build: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    """Parse and run; returns the exit status."""
    try:
        parser = build()
        variables = variables_of(parser)
        for warning in read_settings(of_flags=variables).warnings:
            print(f"tandem: warning: {warning}", file=sys.stderr)
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return _run(args, variables)
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
