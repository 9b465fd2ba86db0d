#!/usr/bin/env python3
"""Lists words that docs/glossary.md replaces: a tool for writers, not a gate.

    tools/words.py                       a table: matches by part of the repository
    tools/words.py docs/routing.md       each match in these files, as FILE:LINE: word => use instead: line
    tools/words.py --list engine         the same for a directory
    tools/words.py --names tests         only names that code defines (functions, classes, arguments)

In Python files it reads defined names, comments, docstrings and other strings; in tests no strings, because prompts are
data. In other files it reads all text, without the targets of links. A line with `words: ok` is skipped.

The rules are words that the glossary replaces whatever the sentence. Words that only some sentences should not have
("says", "behind") are not listed: a reader has to judge them.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("engine", "services", "operator", "lab", "charts", "docs", "tests", "benchmarks", "tools", "docker")
SUFFIXES = {".py", ".md", ".lua", ".js", ".sh", ".tpl", ".html"}
GENERATED = (
    "crds/",
    "tools/corpus/",
    "tandem_lab/accuracy.txt",
    "_pb2.py",
    "docs/glossary.md",
    "tools/words.py",
    "docs/adr/",
)
MAX_TEST_NAME = 60


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    instead: str


def rule(pattern: str, instead: str, flags: int = re.IGNORECASE) -> Rule:
    return Rule(re.compile(pattern, flags), instead)


PEOPLE = (
    "user",
    "client",
    "admin",
    "administrator",
    "reader",
    "engineer",
    "anyone",
    "person",
    "people",
    "caller",
    "fox",
)
"""After these `who` is right; the fox is that of the prompts of examples."""
AFTER_PEOPLE = "".join(rf"(?<!{word} )(?<!{word}s )" for word in PEOPLE)

RULES = [
    rule(r"(?<!-)" + AFTER_PEOPLE + r"\b(who|whom|whoever|whomever)\b(?!-)", "the component"),
    rule(r"\b(no|some|any|every)bod(y|ies)('?s)?\b", "no worker, any caller"),
    rule(r"(?<!unless )\b(told|retold|telling)\b(?! (apart|from))", "report, notify, return"),
    rule(r"\b(anew|for ever|in vain|meanwhile|thereby|hitherto)\b", "again, forever, in the meantime"),
    rule(
        r"\b(twin|mishap|newcomer|stranger|usurper|heir|visit|visitor|farewell|parting|lookout|lifeline|introduction"
        r"|lesson|desk|loan|lender)s?\b",
        "the field's word",
    ),
    rule(r"\b(lend|lends|lent|lending|borrow|borrows|borrowed|borrowing)\b", "source, serve, pin"),
    rule(
        r"\b(convict(s|ed|ing)?|accus\w+|acquit\w*|court|guilty|innocent|amnesty|forgiv\w+|on trial|suspicions?)\b",
        "fault, isolate, quarantine",
    ),
    rule(r"\bwish(es|ed)?\b", "pending finish, queue head"),
    rule(r"\blast words?\b|\bknock(s|ed|ing)?\b", "exit message, probe"),
    rule(r"\b(unsound|senseless|rubbish)\b", "corrupted, invalid, malformed"),
    rule(
        r"\b(giv(e|es|ing|en)|gave) way\b|\blet(s|ting)? go\b|\blets? in\b|\b(kept|keeps?) back\b|\bput right\b"
        r"|\b(sent|sends?|turned|turns?) away\b|\bsees? to\b|\bcomes? home\b",
        "yield, release, admit, reject, handle",
    ),
    rule(r"\b(go|goes|going|went|gone) on\b", "continue, resume"),
    rule(r"\b(hears?|heard|overhear\w*|said)\b", "receive, reply"),
    rule(r"\b(complain\w*|troubles?|patience)\b", "error, failure, timeout"),
    rule(r"\b(bears?|bore|borne)\b|\blone\b(?! surrogate)", "tolerate, single"),
    rule(
        r"\b\w*(normal|token|penal|optim|serial|initial|recogn|organ|minim|maxim|summar|quant|synchron|special|general)"
        r"is(e|ed|es|ing|ation)\b|(?<!policy-)(?<!policy_)(?<!policy )\b(ageing|behaviour|colour|favour)\w*\b",
        "American spelling",
    ),
    rule(r"\b_?(MOST|LEAST|FEWEST|LONGEST|SHORTEST|LARGEST|SMALLEST|WIDEST|SLOWEST)_\w+", "MAX_, MIN_", 0),
]


LINK = re.compile(r"(?<=\])\([^)\s]*\)|\badr/\S+|\bdocs/adr/\S+")
"""Targets of links and names of decision records: they keep the words of their time."""

WIRE_NAME = re.compile(r'"wishes"|\bwishes(?= +HASH| = |, \d places)')
"""A key of Redis and a field of a reply: they keep their names while an earlier release reads them."""

VISITOR = re.compile(r"visit_[A-Z]\w*")
"""A method that the visitors of `ast` and jinja2 call by its name."""


class Match(NamedTuple):
    path: Path
    line: int
    word: str
    instead: str
    text: str


def split_name(name: str) -> str:
    """`_fairQueue_head` as words, so that rules see `fair queue head`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").strip()


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each function, class, argument and assigned name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def docstring_lines(tree: ast.AST) -> set[int]:
    """First lines of docstrings, also of those behind an assignment."""
    return {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def python_texts(source: str, strings: bool) -> Iterator[tuple[int, str]]:
    """Line and text of every comment, docstring and, with `strings`, other string."""
    docstrings = docstring_lines(ast.parse(source))
    middle = getattr(tokenize, "FSTRING_MIDDLE", None)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_string = token.type == tokenize.STRING or token.type == middle
        if token.type == tokenize.COMMENT or (is_string and (strings or token.start[0] in docstrings)):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def texts(path: Path, names_only: bool) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        if not names_only:
            yield from enumerate(source.splitlines(), start=1)
        return
    for line, name in defined_names(ast.parse(source)):
        if not VISITOR.fullmatch(name):
            yield line, name if name.isupper() else split_name(name)
    if not names_only:
        yield from python_texts(source, strings="tests" not in path.relative_to(ROOT).parts)


def matches(path: Path, names_only: bool = False) -> Iterator[Match]:
    """All words of a file that a rule replaces, and test names that are too long."""
    lines = path.read_text(encoding="utf-8").splitlines()
    seen: set[tuple[int, str]] = set()
    for number, text in texts(path, names_only):
        if "words: ok" in lines[number - 1]:
            continue
        for pattern, instead in RULES:
            for found in pattern.finditer(WIRE_NAME.sub("", LINK.sub("", text))):
                key = (number, found.group())
                if key not in seen:
                    seen.add(key)
                    yield Match(path, number, found.group(), instead, text.strip())
    if path.name.startswith("test_"):
        for node in ast.walk(ast.parse("\n".join(lines))):
            name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
            if name.startswith("test_") and len(name.removeprefix("test_")) > MAX_TEST_NAME:
                yield Match(path, node.lineno, name, f"at most {MAX_TEST_NAME} characters", name)


def files_in(places: list[Path]) -> list[Path]:
    """Every file of these files and directories that people write."""
    found = [
        file
        for place in places
        for file in ([place] if place.is_file() else sorted(place.rglob("*")))
        if file.suffix in SUFFIXES and file.is_file()
    ]
    return [file for file in found if not any(part in file.relative_to(ROOT).as_posix() for part in GENERATED)]


def print_table() -> None:
    columns = {part: Counter[str]() for part in PARTS}
    for part in PARTS:
        for file in files_in([ROOT / part]):
            columns[part].update(match.instead for match in matches(file))
    kinds = sorted({kind for counter in columns.values() for kind in counter})
    print(f"{'':52}" + "".join(f"{part:>11}" for part in PARTS))
    for kind in kinds:
        print(f"{kind:52}" + "".join(f"{columns[part][kind]:11}" for part in PARTS))
    print(f"{'all':52}" + "".join(f"{sum(columns[part].values()):11}" for part in PARTS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and directories; none: a table of the repository")
    parser.add_argument("--list", action="store_true", help="list every match also without paths")
    parser.add_argument("--names", action="store_true", help="read only names that code defines")
    args = parser.parse_args()
    if not args.paths and not args.list:
        print_table()
        return 0
    places = [path.resolve() for path in args.paths] or [ROOT / part for part in PARTS]
    for file in files_in(places):
        for match in matches(file, names_only=args.names):
            where = match.path.relative_to(ROOT)
            print(f"{where}:{match.line}: {match.word} => {match.instead}: {match.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
