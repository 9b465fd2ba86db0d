# ruff: noqa: ANN001, ANN201, ANN202, ARG001, ARG002, E501, N815, PLC0206, PLC0207, RET504, RUF021, RUF059, RUF100, SIM102, SIM114
"""Moves and merges modules as `moves.tsv` plans it, and rewrites every import, string and path that names one.

    python tools/rehouse/apply.py            apply to the working tree (a second run changes nothing)
    python tools/rehouse/apply.py --plan     only print names that mean two things in one merged file
    python tools/rehouse/apply.py --check    prove that the tree is the one before, moved (against --base, default HEAD)

Data: moves.tsv (every module once), renames.tsv (names that would collide), splits.tsv (names that leave their
module), importlinter.ini (the contracts afterwards), patches.py (small edits that no rule makes).
"""

import argparse
import ast
import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path.cwd()
sys.path.insert(0, str(HERE))

from names import DEFS, Globals, bound  # noqa: E402

OURS = ("tandem_engine", "tandem_services", "tandem_operator")
APPLIED = "engine/tandem_engine/base/errors.py"
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".sh",
    ".ini",
    ".txt",
    ".tsv",
    ".json",
    ".lua",
    ".html",
    ".js",
    ".tpl",
    ".cfg",
    "",
}
NOT_MODULES = {"accuracy", "dfs_weight", "fallback", "fcfs", "lpm", "monitors"}  # words of commands, flags and values
MODULES = {"composition", "full_words", "giving_way", "paged_groups", "peer_side", "sampled_words", "task_groups", "usage_windows", "vector_rows", "vector_softmax", "virtual_counters"}  # fmt: skip
"""Names of modules although code has variables of that name."""
SKIP = ("tools/rehouse/", "models/", "tools/corpus/", "LICENSE", ".importlinter")


def table(name: str) -> list[dict[str, str]]:
    with (HERE / name).open() as lines:
        return list(csv.DictReader((x for x in lines if not x.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE))


def tracked() -> list[str]:
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return sorted(f for f in set(out.stdout.splitlines()) if (ROOT / f).is_file() and not (ROOT / f).is_symlink())


def dotted(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    parts = parts[3:] and ["tandem_testing", *parts[3:]] if path.startswith("tests/support/") else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass
class Plan:
    """The tables, as lookups."""

    target: dict[str, str] = field(default_factory=dict)  # old path → new path
    deleted: set[str] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)  # old module → new module, of all rows in force
    splits: dict[tuple[str, str], str] = field(default_factory=dict)  # (old path, name) → new path
    renames: dict[tuple[str, str], str] = field(default_factory=dict)  # (old module, name) → new name
    paths: dict[str, str] = field(default_factory=dict)  # old path → new path, of those that change
    primary: set[str] = field(default_factory=set)  # sources that give their target its docstring
    ambiguous: set[str] = field(default_factory=set)  # old modules whose name means something else afterwards


def read_plan() -> Plan:
    plan = Plan()
    rows = table("moves.tsv")
    news = {r["new"].split(";")[0] for r in rows} | {
        f"{parent}/__init__.py" for r in rows for parent in [r["new"].split(";")[0].rsplit("/", 1)[0]]
    }
    new_modules = {dotted(n) for n in news if n.endswith(".py")}
    applied = (ROOT / APPLIED).exists()
    for row in rows:
        old, new = row["old"], row["new"].split(";")[0]
        if old != new and applied and (old in news or dotted(old) in new_modules):
            continue  # what stands there now is the new one
        if row["action"] == "delete":
            plan.deleted.add(old)
            continue
        if (ROOT / old).exists():
            plan.target[old] = new
        if old != new:
            plan.paths[old] = new
        if old.endswith(".py"):
            plan.modules[dotted(old)] = dotted(new)
            if dotted(old) in new_modules and old != new:
                plan.ambiguous.add(dotted(old))
        if row["action"] in ("keep", "move", "split"):
            plan.primary.add(old)
    for row in table("splits.tsv"):
        plan.splits[row["old"], row["name"]] = row["new"]
    for row in table("renames.tsv"):
        plan.renames[dotted(row["old"]), row["name"]] = row["new"]
    return plan


class Tree:
    """What modules define and import, of the tree before."""

    def to_lab(self, module: str, package: str) -> bool:
        homes = (self.plan.modules.get(module, module), self.plan.modules.get(package, package))
        return homes[0].startswith("tandem_lab") and not homes[1].startswith("tandem_lab")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.defined: dict[str, set[str]] = {}
        self.imported: dict[str, dict[str, tuple[str, str]]] = {}
        self.file: dict[str, str] = {}
        there = {r["new"].split(";")[0] for r in table("moves.tsv")} if (ROOT / APPLIED).exists() else set()
        for path in sorted({*plan.target, *(t for t in there if (ROOT / t).exists())}):
            if not path.endswith(".py"):
                continue
            tree = ast.parse((ROOT / path).read_text("utf-8"))
            module = dotted(path)
            self.file[module] = path
            self.defined[module] = set()
            self.imported[module] = {}
            for node in tree.body:
                if isinstance(node, ast.ImportFrom):
                    for a in node.names:
                        self.imported[module][a.asname or a.name] = (node.module or "", a.name)
                elif not isinstance(node, ast.Import) and not type_checking(node):
                    self.defined[module] |= bound([node])

    def is_module(self, module: str, name: str) -> bool:
        return (
            f"{module}.{name}" in self.file
            and name not in self.defined.get(module, ())
            and name not in self.imported.get(module, ())
        )

    def definer(self, module: str, name: str) -> tuple[str, str]:
        """Where `name` of `module` is defined, past modules that import it; packages that export it stay."""
        while name not in self.defined.get(module, {name}):
            source = self.imported[module].get(name)
            if source is None or source[0] not in self.file:
                break
            if self.file[module].endswith("__init__.py") and not self.to_lab(source[0], module):
                break
            module, name = source
        return module, name


def type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@dataclass
class Edits:
    source: bytes
    starts: list[int]
    found: list[tuple[int, int, str]] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> "Edits":
        raw = text.encode()
        starts = [0]
        for line in raw.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return cls(raw, starts)

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def replace(self, start: int, end: int, text: str) -> None:
        if (start, end, text) not in self.found:
            self.found.append((start, end, text))

    def node(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, start: int, end: int) -> str:
        """The source between two offsets, edited."""
        out, at = [], start
        for a, b, new in sorted(x for x in self.found if start <= x[0] and x[1] <= end):
            if a < at:
                continue  # inside of what another edit replaced
            out += [self.source[at:a].decode(), new]
            at = b
        return "".join([*out, self.source[at:end].decode()])


def names_and_words() -> set[str]:
    """Every name and every string of one word in Python code."""
    found: set[str] = set()
    files = tracked() if (ROOT / ".git").exists() else [str(f.relative_to(ROOT)) for f in ROOT.rglob("*.py")]
    for file in files:
        if not file.endswith(".py") or file.startswith("tools/rehouse/"):
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
            for name in ("name", "id", "arg", "attr", "value"):
                word = getattr(node, name, None)
                if isinstance(word, str) and not isinstance(node, ast.alias):
                    found.add(word)
    return found


class Strings:
    """Old names of modules and paths in free text."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dotted = re.compile(r"(?<![\w./-])(?:" + "|".join(OURS) + r")(?:\.\w+)+")
        self.packages: dict[str, str] = {}
        for old, new in plan.paths.items():
            if old.endswith("__init__.py"):
                self.packages[old.rsplit("/", 1)[0]] = new.rsplit("/", 1)[0]
        self.relative: dict[str, str] = {}
        seen: dict[str, str | None] = {}
        for old in [*plan.paths, *[t for t in plan.target if t not in plan.paths]]:
            short = old.split("/", 2)[2]
            seen[short] = None if short in seen else old
        for short, old in seen.items():
            if old and "/" in short and old in plan.paths:
                self.relative[short] = plan.paths[old].split("/", 2)[2]
        self.path = re.compile(
            r"(?<![\w.-])(?:\.\./|\./)*(?:(?:engine|services|operator)/)?(?:" + "|".join(OURS) + r")(?:/[\w.*-]+)+/?"
        )
        self.short = re.compile(r"(?<![\w./-])[a-z_0-9]+(?:/[a-z_0-9]+)+\.py\b")
        self.ticked = re.compile(r"`([a-z_0-9]+(?:\.\w+)+)`")
        self.bare: dict[str, str] = {}
        """Old names of modules that name nothing else, with those that hold what they held."""
        self.suffixes: dict[str, str] = {}
        bases: dict[str, set[str]] = defaultdict(set)
        ends: dict[str, set[str]] = defaultdict(set)
        for old in {*plan.paths, *plan.target}:
            new = plan.paths.get(old, old)
            if old.endswith(".py") and new.endswith(".py") and not old.endswith("__init__.py"):
                bases[Path(old).stem].add(Path(new).stem)
                ends["/".join(old.split("/")[-2:])].add(new.split("/", 2)[2] if old != new else "")
        used = names_and_words()
        there = {part.removesuffix(".py") for row in table("moves.tsv") for part in row["new"].split(";")[0].split("/")}
        for stem, found in bases.items():
            if len(found) == 1 and stem not in found and stem not in there | NOT_MODULES | (used - MODULES):
                self.bare[stem] = next(iter(found))
        for end, found in ends.items():
            if len(found) == 1 and next(iter(found)) not in ("", end):
                self.suffixes[end] = next(iter(found))
        self.word = re.compile(r"`([a-z_0-9]+)((?:\.\w+)*)`")
        self.noted: set[str] = set()

    @cached_property
    def applied(self) -> bool:
        return (ROOT / APPLIED).exists()

    @staticmethod
    def _is_file(module: str) -> bool:
        root = {"tandem_engine": "engine", "tandem_services": "services", "tandem_operator": "operator"}.get(
            module.split(".")[0], "lab"
        )
        return (ROOT / root / (module.replace(".", "/") + ".py")).exists()

    def _dotted(self, match: re.Match[str]) -> str:
        parts = match[0].split(".")
        for count in range(len(parts), 1, -1):
            module = ".".join(parts[:count])
            if self.applied and self._is_file(".".join(parts[: count - 1])):
                continue  # a name in a module that stands there now
            if module in self.plan.modules:
                rest = parts[count:]
                new = self.plan.modules[module]
                if rest:
                    path = next((o for o in self.plan.paths if o.endswith(".py") and dotted(o) == module), "")
                    if (path, rest[0]) in self.plan.splits:
                        new = dotted(self.plan.splits[path, rest[0]])
                    rest[0] = self.plan.renames.get((module, rest[0]), rest[0])
                return ".".join([new, *rest])
        return match[0]

    def _path(self, match: re.Match[str]) -> str:
        whole = match[0]
        ours = next(i for i in (whole.find(o) for o in OURS) if i >= 0)
        head, tail = whole[:ours], whole[ours:].rstrip("/.")
        end = whole[ours + len(tail) :]
        root = {"tandem_engine": "engine", "tandem_services": "services", "tandem_operator": "operator"}[
            tail.split("/")[0]
        ]
        key = f"{root}/{tail}"
        new = self.plan.paths.get(key) or self.packages.get(key)
        if new is None and key.endswith("/**"):
            inner = self.packages.get(key.removesuffix("/**"))
            new = inner and f"{inner}/**"
        if new is None:
            return whole
        first, rest = new.split("/", 1)
        if head.endswith(f"{root}/"):
            return head.removesuffix(f"{root}/") + new + end
        return head + (new if first == "tests" else rest) + end

    def fix(self, text: str) -> str:
        if "tandem_" in text:
            text = self.dotted.sub(self._dotted, text)
            text = self.path.sub(self._path, text)
        text = self.short.sub(lambda m: self.relative.get(m[0]) or self.suffixes.get(m[0], m[0]), text)
        return self.word.sub(self._word, self.ticked.sub(self._ticked, text))

    def _word(self, match: re.Match[str]) -> str:
        new = self.bare.get(match[1])
        if new is None:
            return match[0]
        self.noted.add(f"{match[1]} -> {new}")
        return f"`{new}{match[2]}`"

    def _ticked(self, match: re.Match[str]) -> str:
        parts = match[1].split(".")
        for count in (len(parts), len(parts) - 1):
            short = "/".join(parts[:count]) + ".py"
            there = self.relative.get(short) or self.suffixes.get(short)
            if count > 1 and there:
                new = ".".join([there.removesuffix(".py").replace("/", "."), *parts[count:]])
                self.noted.add(f"{match[1]} -> {new}")
                return f"`{new}`"
        return match[0]


@dataclass
class Part:
    """One source, or the part of it that goes to one target."""

    source: str
    target: str
    doc: str
    imports: list[str]
    typing_imports: list[str]
    before: list[str]
    body: list[tuple[frozenset[str], str, str]]  # names bound, text, dump
    main: str
    needs: set[str]  # sources imported when the module loads
    notes: list[str] = field(default_factory=list)  # comments of the whole file


class Rewriter:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.tree, self.strings = plan, Tree(plan), Strings(plan)
        self.problems: list[str] = []
        self._names: dict[tuple[str, ...], set[str]] = {}

    def names_in(self, here: str | None, path: str) -> set[str]:
        """Every name that occurs in any source of a target."""
        if here is None:
            sources = [path]
        else:
            sources = [s for s, t in self.plan.target.items() if s.endswith(".py") and dotted(t) == here]
        key = tuple(sources)
        if key not in self._names:
            found: set[str] = set()
            for source in sources:
                for node in ast.walk(ast.parse((ROOT / source).read_text("utf-8"))):
                    if isinstance(node, ast.Name):
                        found.add(node.id)
                    elif isinstance(node, ast.arg):
                        found.add(node.arg)
                    elif isinstance(node, DEFS):
                        found.add(node.name)
                    elif isinstance(node, ast.alias):
                        found.add(node.asname or node.name)
            self._names[key] = found
        return self._names[key]

    # -- one import

    def resolve(self, module: str, name: str) -> tuple[str, str, str] | None:
        """("module" | "name", new module, new name) of `from module import name`; None where nothing is known."""
        if (
            self.plan.modules.get(module, module) == module
            and name in self.tree.defined.get(module, ())
            and (module, name) not in self.plan.renames
            and (self.tree.file[module], name) not in self.plan.splits
        ):
            return ("name", module, name) if module in self.plan.modules else None
        if self.tree.is_module(module, name) or (
            f"{module}.{name}" in self.plan.modules
            and name not in self.tree.defined.get(module, ())
            and not self.plan.modules.get(module)
        ):
            new = self.plan.modules.get(f"{module}.{name}")
            if new is None:
                return None
            return ("module", *new.rsplit(".", 1))  # type: ignore[return-value]
        source, original = self.tree.definer(module, name)
        if source not in self.plan.modules:
            return None
        new_name = self.plan.renames.get((source, original), original)
        path = self.tree.file.get(source) or next((o for o in self.plan.paths if dotted(o) == source), "")
        split = self.plan.splits.get((path, original))
        return "name", dotted(split) if split else self.plan.modules[source], new_name

    def rewrite(self, path: str, targets: dict[str, str] | None) -> list[Part]:
        """`targets`: target of each split name, "" for all else; None: a file that stays where it is."""
        text = (ROOT / path).read_text("utf-8")
        tree = ast.parse(text)
        edits, scope = Edits.of(text), Globals(tree)
        here = None if targets is None else dotted(targets[""])
        own = dotted(path) if targets is not None else None
        renamed: dict[str, str] = {}

        def rename(local: str, new: str) -> bool:
            """Every use of the global `local` becomes `new`; False where a scope has a `new` of its own."""
            if any(new in scope.around[id(n)] for n in scope.uses[local]):
                return False
            if new in scope.uses and renamed.get(local) != new and new not in bound_here:
                return False
            renamed[local] = new
            for node in scope.uses[local]:
                if isinstance(node, ast.Name):
                    edits.replace(*edits.node(node), new)
                elif isinstance(node, (ast.Global, ast.Constant)):
                    start, end = edits.node(node)
                    edits.replace(start, end, re.sub(rf"\b{local}\b", new, edits.source[start:end].decode()))
                elif isinstance(node, DEFS):
                    line = node.lineno
                    raw = edits.source[edits.at(line, 0) : edits.starts[line]].decode()
                    column = re.search(rf"\b{local}\b", raw)
                    assert column is not None
                    edits.replace(edits.at(line, column.start()), edits.at(line, column.end()), new)
            return True

        bound_here: set[str] = set()
        if own is not None:
            for name in sorted(self.tree.defined.get(own, ())):
                new = self.plan.renames.get((own, name))
                if new and not rename(name, new):
                    self.problems.append(f"{path}: cannot rename {name} to {new}")

        before: list[str] = []
        imports: list[str] = []
        typing_imports: list[str] = []
        top = {id(n) for n in tree.body}
        in_typing = {id(m) for n in tree.body if type_checking(n) for m in ast.walk(n)}
        needs: set[str] = set()

        def lines_of(node: ast.ImportFrom) -> list[str]:
            by: dict[str, list[str]] = {}
            for a in node.names:
                found = self.resolve(node.module or "", a.name)
                local = a.asname or a.name
                wanted = self.plan.renames.get((own or "", local))
                if wanted and local not in self.tree.defined.get(own or "", ()) and rename(local, wanted):
                    assert found is not None
                    by.setdefault(found[1], []).append(f"{found[2]} as {wanted}")
                    continue
                at_top = id(node) in top or id(node) in in_typing
                if found is None:
                    by.setdefault(node.module or "", []).append(a.name + (f" as {a.asname}" if a.asname else ""))
                    continue
                kind, module, name = found
                if id(node) in top and kind == "name":
                    source = self.tree.definer(node.module or "", a.name)[0]
                    needs.add(self.tree.file.get(source, ""))
                    needs.add(self.tree.file.get(node.module or "", ""))
                if kind == "module":
                    if id(node) in top:
                        needs.add(self.tree.file.get(f"{node.module}.{a.name}", ""))
                    old = f"{node.module}.{a.name}"
                    self._attributes(scope, edits, local, old, here == f"{module}.{name}", path, here)
                    if here == f"{module}.{name}":
                        for use in scope.uses[local]:
                            if not isinstance(scope.parents.get(id(use)), ast.Attribute):
                                edits.replace(*edits.node(use), "sys.modules[__name__]")
                                imports.append("import sys")
                        continue
                    if a.asname is None and at_top and name not in self.names_in(here, path) and rename(local, name):
                        local = name
                    by.setdefault(module, []).append(name + (f" as {local}" if local != name else ""))
                    continue
                if module == here:
                    if local != name and not rename(local, name):
                        self.problems.append(f"{path}: {local} is {name} of the same file now, but cannot be renamed")
                    continue
                alias = a.asname
                if alias is None and name != a.name:
                    if not (at_top and rename(a.name, name)):
                        alias = a.name
                by.setdefault(module, []).append(name + (f" as {alias}" if alias and alias != name else ""))
            return [f"from {m} import {', '.join(ns)}" for m, ns in by.items()]

        spans: list[tuple[int, int]] = []  # imports that leave the body, with the comments before them
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                ours = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS
                start, end = edits.node(node)
                raw = edits.source[start:end].decode()
                if ours:
                    assert isinstance(node, ast.ImportFrom)
                    new = lines_of(node)
                else:
                    new = [self.strings.dotted.sub(self.strings._dotted, raw) if isinstance(node, ast.Import) else raw]
                    for a in node.names if id(node) in top else []:
                        wanted = self.plan.renames.get((own or "", a.asname or a.name))
                        if (
                            wanted
                            and (a.asname or a.name) not in self.tree.defined.get(own or "", ())
                            and rename(a.asname or a.name, wanted)
                        ):
                            new = [re.sub(rf"\b{a.name}\b(?! import)", f"{a.name} as {wanted}", raw)]
                changed = not ours or self._same(node, new)
                if targets is not None and (id(node) in top or id(node) in in_typing):
                    tail = edits.source[end : edits.source.index(b"\n", end)].decode().strip()
                    lead = self._comments_before(edits, node.lineno)
                    kept = [raw] if ours and changed else new
                    if tail.startswith("#") and kept:
                        kept[-1] += "  " + tail
                    (typing_imports if id(node) in in_typing else imports).extend(
                        ["\n".join([*lead, x]) if i == 0 else x for i, x in enumerate(kept)]
                    )
                    if id(node) in top:
                        spans.append((node.lineno - len(lead), node.end_lineno or node.lineno))
                elif not changed or not ours:
                    if raw != "\n".join(new):
                        pad = " " * node.col_offset
                        notes = re.findall(r"#.*", raw)
                        tail = edits.source[end : edits.source.index(b"\n", end)].decode().strip()
                        if new and (notes or tail.startswith("#")):
                            note = "  " + (notes[0] if notes else tail)
                            new = [x + note for x in new[: None if notes else -1]] + ([] if notes else new[-1:])
                        if new:
                            edits.replace(start, end, ("\n" + pad).join(new))
                        else:
                            alone = any(
                                isinstance(block, list) and block == [node]
                                for block in (
                                    getattr(scope.parents[id(node)], k, None) for k in ("body", "orelse", "finalbody")
                                )
                            )
                            if alone:
                                edits.replace(start, end, "pass")
                            else:
                                edits.replace(
                                    edits.at(node.lineno, 0), edits.starts[node.end_lineno or node.lineno], ""
                                )
        self._free_text(text, edits, tree)
        if path.endswith("/test_internal_waits.py"):  # names of constants by their modules below the package
            short = {old.partition(".")[2]: new.partition(".")[2] for old, new in self.plan.modules.items()}
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and re.fullmatch(r"[a-z_0-9.]+\.[A-Z_0-9]+", node.value)
                ):
                    module, _, name = node.value.rpartition(".")
                    if short.get(module, module) != module:
                        old_module = next(m for m in self.plan.modules if m.partition(".")[2] == module)
                        name = self.plan.renames.get((old_module, name), name)
                        edits.replace(*edits.node(node), f'"{short[module]}.{name}"')
        if path == "engine/tandem_engine/__init__.py":  # its table of homes: modules by their names below the package
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
                    new_home = self.plan.modules.get(f"tandem_engine.{node.value}")
                    if new_home:
                        edits.replace(*edits.node(node), f'"{new_home.removeprefix("tandem_engine.")}"')
        if targets is None:
            return [
                Part(
                    path,
                    path,
                    "",
                    [],
                    [],
                    before,
                    [(frozenset(), late_imports(edits.text(0, len(edits.source))), "")],
                    "",
                    set(),
                )
            ]
        return self._parts(path, targets, tree, edits, scope, spans, imports, typing_imports, before, needs, renamed)

    @staticmethod
    def _same(node: ast.ImportFrom, new: list[str]) -> bool:
        return len(new) == 1 and ast.dump(ast.parse(new[0]).body[0]) == ast.dump(ast.parse(ast.unparse(node)).body[0])

    def _attributes(
        self, scope: Globals, edits: Edits, local: str, old: str, itself: bool, path: str, here: str | None
    ) -> None:
        """Uses `local.name` of a module that is imported whole."""
        for node in scope.uses[local]:
            parent = scope.parents.get(id(node))
            if not isinstance(parent, ast.Attribute):
                continue
            new = self.plan.renames.get((old, parent.attr), parent.attr)
            split = self.plan.splits.get((self.tree.file.get(old, ""), parent.attr))
            if split:
                self.problems.append(f"{path}: {local}.{parent.attr} goes to {split}")
            if itself:
                if new in scope.around[id(node)]:
                    self.problems.append(f"{path}:{parent.lineno}: {local}.{parent.attr} would be a local name")
                edits.replace(*edits.node(parent), new)
            elif new != parent.attr:
                start, end = edits.node(parent)
                edits.replace(end - len(parent.attr), end, new)

    @staticmethod
    def _comments_before(edits: Edits, line: int) -> list[str]:
        found: list[str] = []
        while line > 1:
            raw = edits.source[edits.starts[line - 2] : edits.starts[line - 1] - 1].decode()
            if not raw.startswith("#"):
                break
            found.insert(0, raw)
            line -= 1
        return found

    def _free_text(self, text: str, edits: Edits, tree: ast.Module) -> None:
        """Strings and comments."""
        lines = text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                lines[node.lineno - 1] = ""
        prose = "\n".join(lines)
        if self.strings.fix(prose) == prose:
            return
        lines = text.split("\n")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                new = self.strings.fix(token.string)
                if new != token.string:
                    a = len(lines[token.start[0] - 1][: token.start[1]].encode())
                    b = len(lines[token.end[0] - 1][: token.end[1]].encode())
                    edits.replace(edits.at(token.start[0], a), edits.at(token.end[0], b), new)

    def _parts(self, path, targets, tree, edits, scope, spans, imports, typing_imports, before, needs, renamed):  # type: ignore[no-untyped-def]
        body = list(tree.body)
        doc = ""
        cursor = 1
        if (
            body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            doc = edits.text(*edits.node(body[0]))
            cursor = body[0].end_lineno + 1
            body = body[1:]
        removed = {n for a, b in spans for n in range(a, b + 1)}
        parts: dict[str, Part] = {}
        for target in dict.fromkeys([targets[""], *targets.values()]):
            mine = [x for x in imports if target == targets[""] or not x.startswith(f"from {dotted(target)} import ")]
            parts[target] = Part(
                path,
                target,
                doc if target == targets[""] else "",
                mine,
                list(typing_imports),
                list(before) if target == targets[""] else [],
                [],
                "",
                set(needs),
            )
        index = 0
        while index < len(body):
            node = body[index]
            last = node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and index + 1 < len(body):
                after = body[index + 1]
                if (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    last = after
                    index += 1
            index += 1
            end = last.end_lineno
            # A comment behind the statement ends its line; comments before the next belong to the next.
            lead_start = cursor
            cursor = end + 1
            if isinstance(node, (ast.Import, ast.ImportFrom)) or (
                type_checking(node) and all(isinstance(m, (ast.Import, ast.ImportFrom)) for m in node.body)
            ):
                stray = [n for n in range(lead_start, end + 1) if n not in removed]
                lines = [edits.source[edits.starts[n - 1] : edits.starts[n] - 1].decode() for n in stray]
                lines = [] if type_checking(node) else [x for x in lines if x.strip()]
                parts[targets[""]].notes += lines
                continue
            text = edits.text(edits.starts[lead_start - 1], min(edits.starts[end], len(edits.source))).strip("\n")
            names = frozenset(renamed.get(n, n) for n in bound([node]))
            goes = {targets[n] for n in bound([node]) if n in targets and n}
            target = goes.pop() if goes else targets[""]
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                parts[target].main = text
            else:
                parts[target].body.append((names, text, ast.dump(node)))
        tail = edits.text(
            edits.starts[cursor - 1] if cursor - 1 < len(edits.starts) else len(edits.source), len(edits.source)
        ).strip("\n")
        if tail:
            self.problems.append(f"{path}: text after the last statement: {tail[:60]}")
        if len(parts) > 1:
            self._cross(parts)
        return list(parts.values())

    @staticmethod
    def _cross(parts: dict[str, Part]) -> None:
        """Parts of one source that use each other's names import them."""
        for part in parts.values():
            text = "\n".join(t for _, t, _ in part.body)
            for other in parts.values():
                if other is not part:
                    names = sorted(n for ns, _, _ in other.body for n in ns if re.search(rf"\b{n}\b", text))
                    if names:
                        part.imports.append(f"from {dotted(other.target)} import {', '.join(names)}")


# -- merging


def identities(rewriter: Rewriter, path: str) -> dict[str, tuple[str, ...]]:
    """What each global name of a module before means, after: ("def", module, name), ("import", module, name) …"""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    own, found = dotted(path), {}
    plan = rewriter.plan

    def note(node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom):
            for a in node.names:
                if (own, a.asname or a.name) in plan.renames:
                    continue
                r = rewriter.resolve(node.module or "", a.name) if (node.module or "").startswith("tandem_") else None
                if r is None:
                    found[a.asname or a.name] = ("import", node.module or "", a.name)
                elif r[0] == "module":
                    found[a.asname or a.name] = ("ns", f"{r[1]}.{r[2]}", "")
                else:
                    src = rewriter.tree.definer(node.module or "", a.name)
                    if a.asname is None and r[2] != a.name:
                        found[r[2]] = ("def", *src)
                    elif a.asname and r[1] == dotted(plan.target[path]):
                        continue
                    else:
                        found[a.asname or a.name] = ("def", *src)
        elif isinstance(node, ast.Import):
            for a in node.names:
                found[a.asname or a.name] = (
                    ("import", a.name, "") if a.asname or "." not in a.name else ("import", a.name.split(".")[0], "")
                )
        elif type_checking(node):
            for m in node.body:
                note(m)
        else:
            for n in bound([node]):
                found[plan.renames.get((own, n), n)] = (
                    "def",
                    own,
                    n,
                    ast.dump(node) if isinstance(node, (ast.Assign, ast.AnnAssign, *DEFS)) else "",
                )

    for node in tree.body:
        note(node)
    return found


def conflicts(rewriter: Rewriter) -> list[str]:
    by: dict[str, list[str]] = defaultdict(list)
    for old, new in rewriter.plan.target.items():
        if new.endswith(".py") and old.endswith(".py"):
            by[new].append(old)
    lines = []
    for target, sources in by.items():
        seen: dict[str, tuple[tuple[str, ...], str]] = {}
        for source in sources:
            for name, what in identities(rewriter, source).items():
                if name in seen and seen[name][0][:3] != what[:3]:
                    first, other = seen[name]
                    if (
                        first[0] == what[0] == "def"
                        and len(first) == len(what) == 4
                        and first[3] == what[3]
                        and first[3].startswith(("Assign", "AnnAssign"))
                    ):
                        continue
                    same = " SAME" if first[3:] == what[3:] and first[3:] else ""
                    lines.append(f"{target}\t{name}\t{other} {first[:3]}\t{source} {what[:3]}{same}")
                seen.setdefault(name, (what, source))
    return lines


def late_imports(text: str) -> str:
    """Imports behind code, which say `noqa: E402`: one line for each module, for isort would lose what they say."""
    line = re.compile(r"^from (\S+) import ([^(\n#]+?)  # noqa: E402\n", re.M)
    names: dict[str, list[str]] = {}
    for m in line.finditer(text):
        names.setdefault(m[1], []).extend(x.strip() for x in m[2].split(","))
    counts = Counter(m[1] for m in line.finditer(text))
    done: set[str] = set()

    def once(m: re.Match[str]) -> str:
        if counts[m[1]] == 1:
            return m[0]
        if m[1] in done:
            return ""
        done.add(m[1])
        joined = ", ".join(sorted(dict.fromkeys(names[m[1]])))
        return f"from {m[1]} import {joined}  # noqa: E402\n"

    return line.sub(once, text)


def bound_by_import(line: str) -> dict[str, tuple[str, str]]:
    found = {}
    for node in ast.parse(line).body:
        if isinstance(node, ast.ImportFrom):
            for a in node.names:
                found[a.asname or a.name] = (node.module or "", a.name)
        elif isinstance(node, ast.Import):
            for a in node.names:
                found[a.asname or a.name] = ("", a.name)
    return found


def merge(target: str, parts: list[Part], plan: Plan) -> str:
    """The text of one target."""
    parts = ordered(parts, plan)
    first = next((p for p in parts if p.source in plan.primary and p.doc), None) or next(
        (p for p in parts if p.doc), None
    )
    docs = [p.doc for p in parts if p is not first and p.doc]
    doc = documented(first.doc if first else "", docs)
    imports = list(dict.fromkeys(x for p in parts for x in p.imports))
    at_run = {n for x in imports for n in bound_by_import(x)}
    defined = {n for p in parts for names, _, _ in p.body for n in names}
    typing_lines = []
    for line in dict.fromkeys(x for p in parts for x in p.typing_imports):
        names = bound_by_import(line)
        keep = [n for n in names if n not in at_run and n not in defined]
        if len(keep) == len(names):
            typing_lines.append(line)
        elif keep:
            module = next(iter(names.values()))[0]
            typing_lines.append(
                f"from {module} import "
                + ", ".join(names[n][1] + (f" as {n}" if n != names[n][1] else "") for n in keep)
            )
    if typing_lines and "TYPE_CHECKING" not in at_run:
        imports.append("from typing import TYPE_CHECKING")
    bodies, seen = [], {}
    for part in parts:
        texts = []
        for names, text, dump in part.body:
            key = min(names, default="")
            if names and seen.get(key) == dump and dump.startswith(("Assign", "AnnAssign")):
                continue  # the same constant, said again
            seen.setdefault(key, dump)
            texts.append(text)
        bodies.append("\n\n".join(texts) if False else join(texts, part))
    before = sorted({x for p in parts for x in p.before})
    chunks = [doc, "\n".join(dict.fromkeys(x for p in parts for x in p.notes)), "\n".join(imports)]
    if typing_lines:
        chunks.append("if TYPE_CHECKING:\n" + "\n".join("    " + x.replace("\n", "\n    ") for x in typing_lines))
    chunks += ["\n".join(before), *[b.strip("\n") for b in bodies], *[p.main for p in parts if p.main]]
    return "\n\n\n".join(c for c in chunks if c.strip()) + "\n"


def join(texts: list[str], part: Part) -> str:
    """Statements with the blank lines that stood between them are made by ruff; constants in a row stay together."""
    out = ""
    for text in texts:
        simple = not text.lstrip().startswith(("def ", "class ", "async ", "@", "#"))
        out += (
            "\n"
            if out and simple and "\n" not in text and not out.rstrip("\n").endswith('"""')
            else "\n\n"
            if out
            else ""
        ) + text
    return out


def documented(first: str, others: list[str]) -> str:
    """The first docstring; what further ones explain beyond their first sentence follows as paragraphs."""
    more = []
    for other in others:
        inner = other.strip('"').rstrip()
        if "\n\n" in inner:
            more.append(inner.strip("\n"))
    if not first or not more:
        return first or (others[0] if others else "")
    assert first.startswith('"""'), first[:20]
    inside = first[3:-3].rstrip()
    return '"""' + "\n\n".join([inside, *more]) + '\n"""'


def ordered(parts: list[Part], plan: Plan) -> list[Part]:
    by = {p.source: p for p in parts}
    done: list[Part] = []

    def visit(part: Part, above: tuple[str, ...]) -> None:
        if part in done or part.source in above:
            return
        for need in sorted(part.needs):
            if need in by:
                visit(by[need], (*above, part.source))
        done.append(part)

    for part in sorted(
        parts, key=lambda p: (plan.target.get(p.source) == p.target, p.source not in plan.primary, p.source)
    ):
        visit(part, ())
    return done


def apply() -> None:
    plan = read_plan()
    rewriter = Rewriter(plan)
    by: dict[str, list[Part]] = defaultdict(list)
    moved = {}
    for old, new in plan.target.items():
        if not old.endswith(".py"):
            moved[old] = new
            continue
        targets = {"": new, **{name: to for (path, name), to in plan.splits.items() if path == old}}
        if old == new and ((ROOT / APPLIED).exists() or old.endswith("_pb2.py")):
            continue
        for part in rewriter.rewrite(old, targets):
            by[part.target].append(part)
    if (ROOT / APPLIED).exists():
        for target in list(by):  # what arrived since goes to what is there
            if target in plan.target or (ROOT / target).exists():
                by[target] += rewriter.rewrite(target, {"": target})
    listed = {r["old"] for r in table("moves.tsv")} | {r["new"].split(";")[0] for r in table("moves.tsv")}
    for file in tracked():
        if (
            file.endswith(".py")
            and file.startswith(("engine/", "services/", "operator/"))
            and file not in listed
            and not file.endswith("__init__.py")
        ):
            print(f"not in moves.tsv, stays where it is: {file}")
    others = [f for f in tracked() if f not in plan.target and f not in plan.deleted and not f.startswith(SKIP)]
    texts: dict[str, str] = {}
    for other in others:
        path = ROOT / other
        if path.suffix not in TEXT:
            continue
        try:
            raw = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".py" and "tandem_" not in raw:
            new = rewriter.strings.fix(raw)
        elif path.suffix == ".py" and not other.endswith("_pb2.py"):
            new = rewriter.rewrite(other, None)[0].body[0][1]
        else:
            new = rewriter.strings.fix(raw)
        if new != raw:
            texts[other] = new
    if (ROOT / APPLIED).exists():
        for old, new in plan.target.items():
            if old == new and old not in by and old.endswith(".py"):
                raw = (ROOT / old).read_text("utf-8")
                fixed = rewriter.rewrite(old, None)[0].body[0][1]
                if fixed != raw:
                    texts[old] = fixed
    if rewriter.problems:
        print("\n".join(rewriter.problems))
    written = {target: merge(target, parts, plan) for target, parts in by.items()}
    for old, new in moved.items():
        if old != new:
            move(old, new)
    for target in by:
        first = next(
            (p.source for p in by[target] if p.source in plan.primary and plan.target.get(p.source) == target), None
        )
        if first and first != target and not ((ROOT / target).exists() and target in plan.target):
            move(first, target)
    for old, new in plan.target.items():
        if old.endswith(".py") and old != new and (ROOT / old).exists() and old not in written:
            (ROOT / old).unlink()
    for old in plan.deleted:
        (ROOT / old).unlink(missing_ok=True)
    for path, text in [*written.items(), *texts.items()]:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text if text.strip() else "", "utf-8")
    markers(plan)
    finish()
    for line in sorted(rewriter.strings.noted):
        print("in prose:", line)


def move(old: str, new: str) -> None:
    (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(ROOT / old, ROOT / new)


def markers(plan: Plan) -> None:
    for root in ("engine/tandem_engine", "services/tandem_services", "operator/tandem_operator", "lab/tandem_lab"):
        for folder in [p for p in (ROOT / root).rglob("*") if p.is_dir()] + [ROOT / root]:
            if folder.name == "__pycache__":
                continue
            rest = [p for p in folder.iterdir() if p.name != "__pycache__"]
            if rest == [folder / "__init__.py"] and not rest[0].read_text() or not rest:
                shutil.rmtree(folder)
            elif any(p.suffix == ".py" for p in rest) or any(p.is_dir() and list(p.glob("*.py")) for p in rest):
                (folder / "__init__.py").touch()


def finish() -> None:
    import patches

    patches.apply(ROOT, HERE)
    # Tools that find things by git find what is new.
    ruff = str(ROOT / ".venv/bin/ruff")
    subprocess.run(
        [ruff, "check", "-q", "--select", "I,F401,F811", "--fix", "--exclude", "tools/rehouse", "."],
        cwd=ROOT,
        check=False,
    )
    subprocess.run([ruff, "format", "-q", "--exclude", "tools/rehouse", "."], cwd=ROOT, check=True)
    reflow(ruff)
    page = ROOT / "tools/flags_page.py"
    if page.exists():
        folders = os.pathsep.join(str(ROOT / part) for part in ("engine", "services", "operator", "lab"))
        done = subprocess.run(
            [str(ROOT / ".venv/bin/python"), str(page)],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": folders},
        )
        if done.returncode == 0:
            (ROOT / "docs/flags.md").write_text(done.stdout, "utf-8")
        else:
            print("tools/flags_page.py:", done.stderr[-300:])


def reflow(ruff: str) -> None:
    """Prose of docstrings and comments that a longer name made too wide: its last words go to the next line."""
    for _ in range(12):
        done = subprocess.run(
            [ruff, "check", "--select", "E501", "--output-format", "concise", "--exclude", "tools/rehouse", "."],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        places = [m for m in map(re.compile(r"(.+?):(\d+):\d+: E501").match, done.stdout.splitlines()) if m]
        if not places:
            return
        for m in reversed(places):
            file, number = ROOT / m[1], int(m[2]) - 1
            lines = file.read_text("utf-8").split("\n")
            line = lines[number]
            lead = re.match(r"\s*(?:# )?", line)
            assert lead is not None
            cut = line.rfind(" ", 0, 121)
            rest = line[cut + 1 :]
            code = "#" in line and not line.lstrip().startswith("#")
            if cut <= len(lead[0]) or code:
                continue
            lines[number] = line[:cut]
            after = lines[number + 1] if number + 1 < len(lines) else ""
            follows = re.match(r"\s*(?:# )?", after)
            if (
                follows
                and follows[0] == lead[0]
                and after.strip() not in ("", '"""', "#")
                and not line.rstrip().endswith('"""')
            ):
                lines[number + 1] = lead[0] + rest + " " + after[len(lead[0]) :]
            else:
                lines.insert(number + 1, lead[0] + rest)
            file.write_text("\n".join(lines), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--base", default="HEAD")
    args = parser.parse_args()
    if args.plan:
        rewriter = Rewriter(read_plan())
        print("\n".join(conflicts(rewriter)))
        return 0
    if args.check:
        import proof

        return proof.main(args.base)
    apply()
    return 0


if __name__ == "__main__":
    sys.exit(main())
