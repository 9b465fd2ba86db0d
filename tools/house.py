#!/usr/bin/env python3
"""Prints the size of the repository's structure: modules, lines, folders, import arrows, chains and circles.

    python tools/house.py

Chains and circles count imports at run time, at the top of modules. Circles with type-only imports (`TYPE_CHECKING`)
are counted separately and listed below the table. The exit status is 1 if a limit is exceeded; in CI
`tests/test_layout.py` and `lint-imports` guard the limits.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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


def rows(known: Mapping[str, Module]) -> Iterator[tuple[str, str, str]]:
    """Measure, value, and the limit if there is one."""
    full = {name: module for name, module in known.items() if module.lines}
    for folder, package in PACKAGES.items():
        mine = [one for name, one in full.items() if name.split(".")[0] == package]
        yield f"modules of {folder} (lines)", f"{len(mine)} ({sum(one.lines for one in mine):,})", ""
    sizes = [module.lines for module in full.values()]
    yield "modules (lines)", f"{len(full)} ({sum(sizes):,})", ""
    yield "median lines of a module", f"{median(sizes):.0f}", ""
    yield "modules under 40 / under 80 lines", f"{sum(n < 40 for n in sizes)} / {sum(n < 80 for n in sizes)}", ""
    largest = max(full.values(), key=lambda one: one.lines)
    yield "lines of the largest module", f"{largest.lines} ({largest.name})", str(MAX_LINES)
    folders = Counter(module.path.parent for module in full.values() if module.path.name != "__init__.py")
    folder, count = folders.most_common(1)[0]
    yield "modules of the largest folder", f"{count} ({folder.relative_to(ROOT)})", str(MAX_FILES)
    graph = import_graph(known)
    importers = Counter(target for targets in graph.values() for target in targets)
    yield "modules with one importer", str(sum(importers[name] == 1 for name in full)), ""
    yield "import arrows", f"{sum(len(targets) for targets in graph.values()):,}", ""
    for package in CHAINS:
        yield f"longest chain of imports in {package}", str(longest_chain(graph, package)), ""
    yield "circles of imports", str(len(circles(graph))), "0"
    yield "circles with type-only imports", str(len(circles(import_graph(known, typed=True)))), "0"


def main() -> int:
    exceeded, known = False, modules()
    for measure, value, limit in rows(known):
        over = bool(limit) and int(value.split()[0]) > int(limit)
        exceeded = exceeded or over
        mark = "  EXCEEDED" if over else ""
        print(f"{measure:52} {value}" + (f"   (limit {limit}){mark}" if limit else ""))
    for circle in circles(import_graph(known, typed=True)):
        print("circle:", ", ".join(sorted(circle)))
    return int(exceeded)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
