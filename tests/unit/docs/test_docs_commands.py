"""Commands that pages and `--help` show exist, with every flag that stands behind them."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_engine.cli import build_parser as engine_parser
from tandem_services.cli.k8s.command import build_plugin_parser
from tandem_services.cli.main import build_parser

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "*/README.md", "*/*/README.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md" and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
_COMMAND = re.compile(r"(?<![\w/-])(?:\.venv/bin/)?(kubectl tandem|tandem-engine|tandem)( [^`#|]*)")
_LITERAL = re.compile(r"`([^`\n]+)`")


def parsers() -> dict[str, argparse.ArgumentParser]:
    return {"tandem": build_parser(), "kubectl tandem": build_plugin_parser(), "tandem-engine": engine_parser()}


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def literal_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, continued ones as one, and literals of a line."""
    fenced = False
    for line in text.replace("\\\n", " ").splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.startswith("    "):
            yield line.strip().removeprefix("$ ")
        else:
            yield from _LITERAL.findall(line)


def unknown_words(program: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """What no parser on the way of this command line knows."""
    path, wrong = [program], []
    for number, word in enumerate(words):
        nested = commands_of(path[-1])
        if word in nested:
            path.append(nested[word])
        elif word.startswith("--"):
            flag = word.partition("=")[0].rstrip("`,.;:")
            known = {option for parser in path for option in parser._option_string_actions}
            wrong += [] if flag in known or flag == "--" else [flag]
        elif number == 0 and nested:
            wrong.append(word)
    return wrong


def shown_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    for line in literal_lines(text):
        found = _COMMAND.match(line)
        if found is not None:
            yield found[1], re.split(r"  |[<>&;] ", found[2].strip())[0].split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_shows_only_commands_and_flags_that_exist(page) -> None:
    known = parsers()
    wrong = {
        f"{program} {' '.join(words)}": unknown
        for program, words in shown_commands(page.read_text(encoding="utf-8"))
        if (unknown := unknown_words(known[program], words))
    }
    assert wrong == {}


def test_help_examples_use_existing_commands_and_flags() -> None:
    known = parsers()
    wrong = {}
    for parser in [known["tandem"], *commands_of(known["tandem"]).values()]:
        text = "\n".join(f"    {line.strip()}" for line in (parser.epilog or "").splitlines())
        for program, words in shown_commands(text):
            if unknown := unknown_words(known[program], words):
                wrong[" ".join(words)] = unknown
    assert wrong == {}
