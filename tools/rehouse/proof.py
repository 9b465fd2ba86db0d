# ruff: noqa: ANN001, ANN201, ANN202, ARG001, ARG002, E501, N815, PLC0206, PLC0207, RET504, RUF021, RUF059, RUF100, SIM102, SIM114
"""Proves that a tree is the one before, moved: `apply.py --check [--base REF]`."""

import ast
import hashlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import apply as codemod


def names_of(tree: ast.Module, rewriter: codemod.Rewriter | None, own: str) -> tuple[dict[str, str], set[str]]:
    """(local name → name where it is defined afterwards, names of modules) of one file."""
    local: dict[str, str] = {}
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem_"):
            for a in node.names:
                name = a.asname or a.name
                if rewriter is not None:
                    found = rewriter.resolve(node.module or "", a.name)
                    if found and found[0] == "module":
                        modules.add(name)
                    else:
                        local[name] = found[2] if found else a.name
                elif is_module(f"{node.module}.{a.name}"):
                    modules.add(name)
                else:
                    local[name] = a.name
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                local[a.asname or a.name] = a.name
    if rewriter is not None:
        for (module, name), new in rewriter.plan.renames.items():
            if module == own and name not in local:
                local[name] = new
    return local, modules


def is_module(module: str) -> bool:
    package = module.split(".")[0]
    root = {
        "tandem_engine": "engine",
        "tandem_services": "services",
        "tandem_operator": "operator",
        "tandem_lab": "lab",
    }.get(package)
    if package == "tandem_testing":
        root = "tests/support"
    base = codemod.ROOT / (root or "") / module.replace(".", "/")
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


class Normal(ast.NodeTransformer):
    def __init__(self, local: dict[str, str], modules: set[str], renamed: dict[str, str], fix) -> None:  # type: ignore[no-untyped-def]
        self.local, self.modules, self.renamed, self.fix = local, modules, renamed, fix

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(self.renamed.get(node.attr, node.attr), ast.Load())
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.local.get(node.id, node.id)
        node.ctx = ast.Load()
        return node

    def visit_FunctionDef(self, node):  # type: ignore[no-untyped-def]
        node.name = self.local.get(node.name, node.name)
        self.generic_visit(node)
        node.body = [n for n in node.body if not isinstance(n, ast.Pass)] or [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            value = " ".join(self.fix(node.value).split())
            for old, new in self.local.items():
                value = re.sub(rf"\b{re.escape(old)}\b", new, value)
            node.value = value
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if (node.module or "").startswith("tandem_") else node


def statements(text: str, rewriter: codemod.Rewriter | None, own: str, fix) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
    tree = ast.parse(text)
    local, modules = names_of(tree, rewriter, own)
    renamed = {n: new for (_, n), new in (rewriter.plan.renames if rewriter else {}).items()}
    found = []
    for i, node in enumerate(tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or codemod.type_checking(node):
            continue
        if i == 0 and isinstance(node, ast.Expr):
            continue
        label = getattr(node, "name", None) or ast.unparse(node)[:60]
        found.append((str(label), ast.dump(Normal(local, modules, renamed, fix).visit(node))))
    return found


def moved_only(base: str) -> list[str]:
    here = codemod.ROOT
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", base, "engine", "services", "operator", "tests", "tools", "benchmarks", "docker"],
            cwd=here,
            check=True,
            capture_output=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        codemod.ROOT = Path(folder)
        plan = codemod.read_plan()
        rewriter = codemod.Rewriter(plan)
        before = {}
        for old, new in plan.target.items():
            if old.endswith(".py"):
                before[old, new] = statements(
                    (Path(folder) / old).read_text("utf-8"), rewriter, codemod.dotted(old), rewriter.strings.fix
                )
        codemod.ROOT = here
    after: dict[str, Counter[str]] = {}
    for (old, new), found in before.items():
        targets = {new, *(to for (path, _), to in plan.splits.items() if path == old)}
        for target in targets:
            if target not in after:
                text = (here / target).read_text("utf-8")
                after[target] = Counter(d for _, d in statements(text, None, codemod.dotted(target), lambda s: s))
        for label, dump in found:
            if not any(after[t][dump] for t in targets):
                bad.append(f"changed: {old}: {label}")
    return bad


def stale(plan: codemod.Plan) -> list[str]:
    """Old names of modules that are still said somewhere."""
    bad = []
    name = re.compile(r"(?<![\w./-])(?:" + "|".join(codemod.OURS) + r")(?:\.\w+)+")
    rows = codemod.table("moves.tsv")
    gone = {codemod.dotted(r["old"]) for r in rows if r["old"].endswith(".py") and r["old"] != r["new"]}
    paths = [r["old"] for r in rows if not (codemod.ROOT / r["old"]).exists()]
    for file in codemod.tracked():
        if file.startswith(codemod.SKIP) or (codemod.ROOT / file).suffix not in codemod.TEXT:
            continue
        try:
            text = (codemod.ROOT / file).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for m in name.finditer(text):
            parts = m[0].split(".")
            for count in range(len(parts), 1, -1):
                module = ".".join(parts[:count])
                if is_module(module):
                    break
                if module in gone:
                    bad.append(f"old name in {file}: {m[0]}")
                    break
        bad += [f"old path in {file}: {p}" for p in paths if p in text]
    del plan
    return bad


def sizes() -> list[str]:
    bad = []
    folders: Counter[str] = Counter()
    for root in ("engine/tandem_engine", "services/tandem_services", "operator/tandem_operator", "lab/tandem_lab"):
        for path in (codemod.ROOT / root).rglob("*.py"):
            lines = path.read_text("utf-8").count("\n")
            if lines > 500 and not path.name.endswith("_pb2.py"):
                bad.append(f"{lines} lines: {path}")
            if path.name != "__init__.py":
                folders[str(path.parent)] += 1
    return bad + [f"{n} files: {f}" for f, n in folders.items() if n > 25]


def digest() -> dict[str, str]:
    return {f: hashlib.sha256((codemod.ROOT / f).read_bytes()).hexdigest() for f in codemod.tracked()}


def main(base: str) -> int:
    plan = codemod.read_plan()
    bad = sizes() + stale(plan) + moved_only(base)
    before = digest()
    codemod.apply()
    after = digest()
    bad += [f"a second run changes {f}" for f in sorted(before.keys() | after.keys()) if before.get(f) != after.get(f)]
    print("\n".join(bad))
    print(f"{len(bad)} findings")
    return bool(bad) and not os.environ.get("REHOUSE_REPORT")
