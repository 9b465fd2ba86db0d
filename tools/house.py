#!/usr/bin/env python3
"""Prints the size of the repository's structure: modules, lines, folders, import arrows, chains and circles.

    python tools/house.py

Chains and circles count imports at run time, at the top of modules. Circles with type-only imports (`TYPE_CHECKING`)
are counted separately and listed below the table. The exit status is 1 if a limit is exceeded; in CI
`tests/unit/tools/test_house.py`, `tests/test_layout.py` and `lint-imports` guard the limits.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "engine": "tandem_engine",
    "services": "tandem_services",
    "operator": "tandem_operator",
    "lab": "tandem_lab",
}
CHAINS = (
    "tandem_engine",
    "tandem_engine.scheduler",
    "tandem_engine.disaggregation",
    "tandem_services.gateway",
    "tandem_services.router",
    "tandem_operator.controller",
)
MAX_LINES, MAX_FILES = 500, 25
MIN_MEAN_LINES = 200
SMALL = 80
MAX_PERCENT_UNDER = {40: 3, SMALL: 14}
"""Lines → percent of the modules that may have fewer (docs/adr/0142-measures-of-modules-that-do-not-count-them.md)."""
MAX_SMALL_PARTS = 15
GENERATED = "_pb2"

Graph = dict[str, set[str]]


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module
    lines: int


def modules() -> dict[str, Module]:
    """All modules that ship, by dotted name."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            if GENERATED in path.name:
                continue
            text = path.read_text("utf-8")
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    return found


def top_statements(body: Iterable[ast.stmt], typed: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports at the top of a module; with `typed`, those under `TYPE_CHECKING` too."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            checking = "TYPE_CHECKING" in ast.unparse(node.test)
            if typed or not checking:
                yield from top_statements(node.body, typed)
            yield from top_statements(node.orelse, typed)
        elif isinstance(node, ast.Try):
            yield from top_statements((*node.body, *(one for each in node.handlers for one in each.body)), typed)


def imported_names(module: Module, typed: bool) -> Iterator[str]:
    for node in top_statements(module.tree.body, typed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(known: Mapping[str, Module], *, typed: bool = False) -> Graph:
    """Module → modules of ours that it imports. An imported name counts as its module."""
    graph: Graph = {}
    for name, module in known.items():
        targets = {one if one in known else one.rpartition(".")[0] for one in imported_names(module, typed)}
        graph[name] = {target for target in targets if target in known and target != name}
    return graph


def circles(graph: Graph) -> list[set[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:  # words: ok, the term of graph algorithms
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            component = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(component)

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def longest_chain(graph: Graph, package: str) -> int:
    """Modules in the longest chain of imports within `package`; a circle counts once."""
    inside = {name: graph[name] for name in graph if name == package or name.startswith(f"{package}.")}
    memo: dict[str, int] = {}

    def length(name: str, above: frozenset[str]) -> int:
        if name not in memo:
            targets = [one for one in inside[name] if one in inside and one not in above]
            memo[name] = 1 + max((length(one, above | {name}) for one in targets), default=0)
        return memo[name]

    return max(length(name, frozenset()) for name in inside)


class Row(NamedTuple):
    measure: str
    value: int
    note: str = ""
    at_least: int | None = None
    at_most: int | None = None

    def exceeded(self) -> bool:
        """Whether the value is outside its limits."""
        return (self.at_least is not None and self.value < self.at_least) or (
            self.at_most is not None and self.value > self.at_most
        )

    def text(self) -> str:
        """The row as it is printed."""
        limits = (("at least", self.at_least), ("at most", self.at_most))
        bounds = "".join(f"   ({word} {limit})" for word, limit in limits if limit is not None)
        mark = "  EXCEEDED" if self.exceeded() else ""
        return f"{self.measure:56} {self.value:,}{self.note and ' ' + self.note}{bounds}{mark}"


def importers_of(graph: Graph) -> dict[str, set[str]]:
    """Module → modules of ours that import it."""
    found: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            found[target].add(name)
    return found


def small_parts(known: Mapping[str, Module], graph: Graph) -> list[str]:
    """Modules of less than `SMALL` lines with one importer, which is in the same folder."""
    users = importers_of(graph)
    return [
        name
        for name, module in known.items()
        if 0 < module.lines < SMALL
        and module.path.name != "__init__.py"
        and len(users[name]) == 1
        and known[next(iter(users[name]))].path.parent == module.path.parent
    ]


def size_rows(full: Mapping[str, Module]) -> Iterator[Row]:
    """Sizes of modules and folders."""
    for folder, package in PACKAGES.items():
        mine = [one for name, one in full.items() if name.split(".")[0] == package]
        yield Row(f"modules of {folder}", len(mine), f"of {sum(one.lines for one in mine):,} lines")
    sizes = [module.lines for module in full.values()]
    yield Row("modules", len(sizes), f"of {sum(sizes):,} lines")
    yield Row("mean lines of a module", sum(sizes) // len(sizes), at_least=MIN_MEAN_LINES)
    yield Row("median lines of a module", int(median(sizes)))
    for lines, limit in MAX_PERCENT_UNDER.items():
        under = sum(size < lines for size in sizes)
        yield Row(
            f"percent of modules under {lines} lines", ceil(100 * under / len(sizes)), f"({under})", at_most=limit
        )
    largest = max(full.values(), key=lambda one: one.lines)
    yield Row("lines of the largest module", largest.lines, f"({largest.name})", at_most=MAX_LINES)
    folders = Counter(module.path.parent for module in full.values() if module.path.name != "__init__.py")
    folder, count = folders.most_common(1)[0]
    yield Row("modules of the largest folder", count, f"({folder.relative_to(ROOT)})", at_most=MAX_FILES)


def rows(known: Mapping[str, Module]) -> Iterator[Row]:
    """All measures, with their limits."""
    full = {name: module for name, module in known.items() if module.lines}
    yield from size_rows(full)
    graph = import_graph(known)
    users = importers_of(graph)
    yield Row("modules with one importer", sum(len(users[name]) == 1 for name in full))
    parts = small_parts(known, graph)
    yield Row(f"modules under {SMALL} lines with one importer, next to them", len(parts), at_most=MAX_SMALL_PARTS)
    yield Row("import arrows", sum(len(targets) for targets in graph.values()))
    for package in CHAINS:
        yield Row(f"longest chain of imports in {package}", longest_chain(graph, package))
    yield Row("circles of imports", len(circles(graph)), at_most=0)
    yield Row("circles with type-only imports", len(circles(import_graph(known, typed=True))), at_most=0)


def main() -> int:
    exceeded, known = False, modules()
    for row in rows(known):
        print(row.text())
        exceeded = exceeded or row.exceeded()
    for name in small_parts(known, import_graph(known)):
        print("small, with one importer:", name)
    for circle in circles(import_graph(known, typed=True)):
        print("circle:", ", ".join(sorted(circle)))
    return int(exceeded)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
