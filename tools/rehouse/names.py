# ruff: noqa: ANN001, ANN201, ANN202, ARG001, ARG002, E501, N815, PLC0206, PLC0207, RET504, RUF021, RUF059, RUF100, SIM102, SIM114
"""Which names of a module are global: every `Name` of a syntax tree that resolves to the module, not to a function."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _arguments(node: Scope) -> set[str]:
    a = node.args
    return {x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]}


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below `node` but what lies in scopes of its own; those themselves are among it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, Comprehension)):
            yield from _statements(child)


def bound(body: list[ast.stmt]) -> set[str]:
    """Names that the statements of one scope bind."""
    found: set[str] = set()
    outside: set[str] = set()
    for statement in body:
        for node in [statement, *([] if isinstance(statement, (*DEFS,)) else _statements(statement))]:
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found.add(node.id)
            elif isinstance(node, DEFS):
                found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {a.asname or a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
            elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
                found.add(node.name)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                outside |= set(node.names)
    return found - outside


DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Globals:
    """`uses[name]`: nodes that mean the module's `name`; `shadowed[name]`: scopes around them bind these names."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self.around: dict[int, frozenset[str]] = {}

    @cached_property
    def parents(self) -> dict[int, ast.AST]:
        return {id(child): node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def uses(self) -> dict[str, list[ast.AST]]:
        self._uses: dict[str, list[ast.AST]] = defaultdict(list)
        for statement in self._tree.body:
            self._walk(statement, (), frozenset(), False)
        return self._uses

    def _walk(
        self, node: ast.AST, functions: tuple[frozenset[str], ...], here: frozenset[str], annotation: bool
    ) -> None:
        if isinstance(node, ast.Name):
            if node.id not in here and not any(node.id in names for names in functions):
                self._note(node.id, node, functions, here)
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and annotation:
            try:
                inner = ast.parse(node.value, mode="eval")
            except SyntaxError:
                return
            for name in {n.id for n in ast.walk(inner) if isinstance(n, ast.Name)}:
                if name not in here and not any(name in names for names in functions):
                    self._note(name, node, functions, here)
            return
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            self._walk(node.value, functions, here, False)
            return
        if isinstance(node, ast.Global):
            for name in node.names:
                self._note(name, node, functions, here)
            return
        if isinstance(node, DEFS):
            if node.name not in here and not any(node.name in names for names in functions):
                self._note(node.name, node, functions, here)
            outer = [*node.decorator_list]
            if isinstance(node, ast.ClassDef):
                for part in [*outer, *node.bases, *(k.value for k in node.keywords)]:
                    self._walk(part, functions, here, annotation)
                inside = frozenset(bound(node.body))
                for part in node.body:
                    self._walk(part, functions, inside, False)
                return
            a = node.args
            for part in [*outer, *a.defaults, *filter(None, a.kw_defaults)]:
                self._walk(part, functions, here, False)
            for each in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
                if each.annotation:
                    self._walk(each.annotation, functions, here, True)
            if node.returns:
                self._walk(node.returns, functions, here, True)
            inside = frozenset(_arguments(node) | bound(node.body))
            for part in node.body:
                self._walk(part, (*functions, inside), frozenset(), False)
            return
        if isinstance(node, ast.Lambda):
            for part in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self._walk(part, functions, here, False)
            self._walk(node.body, (*functions, frozenset(_arguments(node))), frozenset(), False)
            return
        if isinstance(node, Comprehension):
            targets = frozenset(n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name))
            self._walk(node.generators[0].iter, functions, here, False)
            for g in node.generators:
                for part in [g.target, *g.ifs, *([] if g is node.generators[0] else [g.iter])]:
                    self._walk(part, (*functions, targets), frozenset(), False)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            for part in parts:
                self._walk(part, (*functions, targets), frozenset(), False)
            return
        if isinstance(node, ast.AnnAssign):
            self._walk(node.target, functions, here, False)
            self._walk(node.annotation, functions, here, True)
            if node.value:
                self._walk(node.value, functions, here, False)
            return
        in_type = annotation or (isinstance(node, ast.Call) and _is_cast(node))
        for child in ast.iter_child_nodes(node):
            self._walk(child, functions, here, in_type)

    def _note(self, name: str, node: ast.AST, functions: tuple[frozenset[str], ...], here: frozenset[str]) -> None:
        self._uses[name].append(node)
        self.around[id(node)] = frozenset().union(here, *functions)


def _is_cast(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar")
