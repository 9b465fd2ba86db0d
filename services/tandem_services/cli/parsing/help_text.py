"""What `--help` prints: a page of common flags and examples, all flags, or those that match a word."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from tandem_services.cli.parsing.flag_table import settings_of
from tandem_services.cli.parsing.hints import about_flag

MAX_EXAMPLES = 5
_COLUMN = 30
"""Where the meaning of a flag starts."""

_FIRST_CLAUSE = re.compile(r"(?<=[^.])(?:[;.:] |\. ?$)")


def short_help(parser: argparse.ArgumentParser, common: Sequence[str]) -> str:
    """Of a command with many flags: `common` ones and examples, on one screen."""
    width = _width()
    actions = [parser._option_string_actions[flag] for flag in common]
    flags = [line for action in actions for line in _line(action, width)]
    groups = ", ".join(_titles(parser))
    ways = [
        "more:",
        f"  {parser.prog} --help-all      all {len(_flags(parser))} flags",
        f"  {parser.prog} --help=WORD     a flag, flags about a word, or a group:",
        *textwrap.wrap(groups, width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]
    described = textwrap.wrap((parser.description or "").strip().split("\n\n")[0], width)
    parts = (
        one_usage_line(parser).rstrip().splitlines(),
        described,
        ["common flags:", *flags],
        _examples(parser),
        ways,
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def matching_help(parser: argparse.ArgumentParser, word: str, *, serves: bool) -> str | None:
    """A group of that title, a flag of that name, or every flag that mentions it; None when nothing does.

    `serves`: see `about_flag`.
    """
    groups = [group for group in parser._action_groups if group.title and group.title.lower() == word.lower()]
    if groups:
        return _full(parser, groups[0].title or "", groups[0]._group_actions)
    flag = f"--{word.lstrip('-').replace('_', '-')}"
    named = parser._option_string_actions.get(flag) or parser._option_string_actions.get(word)
    if named is not None and named.help != argparse.SUPPRESS:
        return _full(parser, "", [named]) + _names(parser, named)
    found = [action for action in _flags(parser) if _mentions(action, word.lower().lstrip("-"))]
    if found:
        return _full(parser, f"flags about {word!r}", found)
    hint = about_flag(flag, [*parser._option_string_actions], serves=serves)
    return f"{hint.removeprefix(' (').removesuffix(')')}\n" if hint else None


def one_usage_line(parser: argparse.ArgumentParser) -> str:
    """argparse's usage where it fits on a line, else the command's name and what it takes besides flags."""
    usage = parser.format_usage()
    if usage.count("\n") == 1:
        return usage
    formatter = parser.formatter_class(prog=parser.prog)
    operands = [action for action in parser._actions if not action.option_strings]
    formatter.add_usage(None, operands, [], prefix="")
    words = " ".join(formatter.format_help().split())[len(parser.prog) :].strip()
    return f"usage: {parser.prog} [FLAG ...]{' ' + words if words else ''}\n"


def _width() -> int:
    return max(40, shutil.get_terminal_size().columns - 2)


def _flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _titles(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        if group.title and group._group_actions and group.title not in ("options", "positional arguments"):
            yield group.title


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in option for option in action.option_strings) or word in (action.help or "").lower()


def _line(action: argparse.Action, width: int) -> list[str]:
    """A flag with the first clause of its help, as much of it as a line has room for."""
    value = "" if action.nargs == 0 else f" {_value_name(action)}"
    name = f"  {action.option_strings[0]}{value}"
    clause = _FIRST_CLAUSE.split(argparse.HelpFormatter("")._expand_help(action))[0].rstrip(".")
    if clause.count("(") > clause.count(")"):
        clause = clause[: clause.rindex("(")].rstrip()
    room = max(20, width - _COLUMN)
    clause = textwrap.shorten(clause, room, placeholder=" …")
    return [f"{name:{_COLUMN}}{clause}"] if len(name) < _COLUMN else [name, f"{'':{_COLUMN}}{clause}"]


def _value_name(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"{name}..." if action.nargs == "+" else name


def _examples(parser: argparse.ArgumentParser) -> list[str]:
    head, *lines = (parser.epilog or "").strip("\n").splitlines() or [""]
    chosen: list[str] = []
    for line in lines:
        if not line.strip() or len(chosen) == MAX_EXAMPLES:
            break
        chosen.append(line)
    return [head, *chosen] if chosen else []


def _full(parser: argparse.ArgumentParser, title: str, actions: Sequence[argparse.Action]) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(title or parser.prog)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def _names(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The other names of a setting."""
    if "--print-config" not in parser._option_string_actions:
        return ""
    found = [setting for setting in settings_of(parser) if setting.action is action]
    return "".join(f"\n  environment: {one.variable}   in a file: {one.key}\n" for one in found)
