"""Prints docs/flags.md, the reference of all commands and flags, from their argument parsers.

    .venv/bin/python tools/flags_page.py > docs/flags.md

A test compares the page with what this prints.
"""

import argparse
import re
from collections.abc import Iterator

from tandem_engine.cli import build_parser as engine_parser
from tandem_operator.cli import parser as operator_parser
from tandem_services.cli.entry import TeachingParser
from tandem_services.cli.k8s.command import build_plugin_parser
from tandem_services.cli.main import build_parser
from tandem_services.cli.parsing.flag_table import settings_of

HEAD = """# Commands and flags

Every command with its flags. `tools/flags_page.py` writes this page from the argument parsers. The columns environment
and file have the names of a flag in the environment and in a [file of settings](settings.md).
"""


def page() -> str:
    parsers = (build_parser(), build_plugin_parser(), engine_parser(), operator_parser())
    return "\n".join([HEAD, *(line for parser in parsers for line in command(parser))])


def command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The section of a command, then those of its subcommands."""
    yield f"## {parser.prog}"
    yield ""
    if parser.description:
        yield first_paragraph(parser.description)
        yield ""
    names = setting_names(parser)
    for group in parser._action_groups:
        yield from flags(group, names)
    for nested in subcommands(parser):
        yield from command(nested)


def first_paragraph(text: str) -> str:
    return cell(text.strip().split("\n\n")[0])


def subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(dict.fromkeys(action.choices.values()))
    return []


def setting_names(parser: argparse.ArgumentParser) -> dict[str, tuple[str, str]]:
    """Variable and key of a file by the name of the value; empty for a command that has no settings."""
    if not isinstance(parser, TeachingParser) or parser.sources is None:
        return {}
    not_variables = parser.sources.not_variables
    return {
        setting.action.dest: ("" if setting.variable in not_variables else f"`{setting.variable}`", f"`{setting.key}`")
        for setting in settings_of(parser)
    }


def flags(group: argparse._ArgumentGroup, settings: dict[str, tuple[str, str]]) -> Iterator[str]:
    shown = [
        action
        for action in group._group_actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction)
    ]
    if not shown:
        return
    if group.title not in ("options", "positional arguments"):
        yield f"**{group.title}**"
        yield ""
    more = ["environment", "file"] if settings else []
    yield row("flag", *more, "default", "meaning")
    yield row(*["---"] * (3 + len(more)), pad="")
    for action in shown:
        columns = settings.get(action.dest, ("", "")) if settings else ()
        yield row(names(action), *columns, default(action), meaning(action))
    yield ""


def row(*cells: str, pad: str = " ") -> str:
    return f"|{'|'.join(f'{pad}{each}{pad}' for each in cells)}|"


def names(action: argparse.Action) -> str:
    options = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
    values = value_of(action)
    return f"{options} {values}".strip()


def value_of(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    if action.choices is not None:
        return cell(", ".join(f"`{choice}`" for choice in action.choices))
    return cell(str(action.metavar or action.dest.upper()))


def default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.nargs == 0 or action.default in (None, argparse.SUPPRESS, False, [], ()):
        return ""
    return cell(f"`{action.default}`")


def meaning(action: argparse.Action) -> str:
    values = {**vars(action), "prog": "", "default": action.default}
    return cell((action.help or "") % values)


def cell(text: str) -> str:
    """Text of one table cell: one line, and no bar that would end it."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    print(page())
