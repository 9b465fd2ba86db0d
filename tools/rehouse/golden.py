# ruff: noqa: ANN001, ANN201, ANN202, ARG001, ARG002, E501, N815, PLC0206, PLC0207, RET504, RUF021, RUF059, RUF100, SIM102, SIM114
"""What must not change when modules move, as files: `golden.py --out DIR` before and after, then `diff -r`.

Run in the root of a checkout with PYTHONPATH on its packages.
"""

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from apply import dotted, table  # noqa: E402

ROOTS = ("engine/tandem_engine", "services/tandem_services", "operator/tandem_operator", "lab/tandem_lab")
ENTRIES = (
    "tandem_engine", "tandem_engine.library.llm", "tandem_engine.cli", "tandem_engine.process.serve", "tandem_engine.node", "tandem_engine.rank",
    "tandem_engine.sampling.grammar.guidance.probe", "tandem_engine.messages.codec", "tandem_engine.ipc.channels",
    "tandem_engine.executor.platform", "tandem_engine.model.loader",
    "tandem_services.cli.main", "tandem_services.cli.up", "tandem_services.cli.k8s.looking", "tandem_services.gateway.app", "tandem_services.gateway.serve",
    "tandem_services.worker.main", "tandem_services.worker.service", "tandem_services.router.router", "tandem_services.router_server.serve",
    "tandem_services.simulate.run", "tandem_operator.cli", "tandem_operator.controller.runtime", "tandem_operator.api.crds",
)  # fmt: skip
MODULES = {
    dotted(r["old"]): dotted(r["new"].split(";")[0])
    for r in table("moves.tsv")
    if r["new"] != "-" and r["old"].endswith(".py")
}
RENAMES = {(dotted(r["old"]), r["name"]): r["new"] for r in table("renames.tsv")}
REPEATS = int(os.environ.get("REPEATS", "3"))  # 0: without sets and times of imports
AFTER = Path("engine/tandem_engine/base/errors.py").exists()


def now(module: str) -> str:
    return MODULES.get(module, module) if AFTER else module


def load(module: str, name: str) -> object:
    return getattr(importlib.import_module(now(module)), name)


def sources() -> list[Path]:
    return sorted(p for root in ROOTS for p in Path(root).rglob("*.py"))


def tests() -> list[str]:
    found = []
    for path in sorted(Path("tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                found.append(f"{path.name}::{node.name}")
    return sorted(found)


def helps() -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(parser: argparse.ArgumentParser, name: str) -> None:
        found[name] = parser.format_help()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command, sub in action.choices.items():
                    walk(sub, f"{name} {command}")

    from tandem_engine.cli import build_parser as engine
    from tandem_operator.cli import parser as operator
    from tandem_services.cli.main import build_parser as tandem

    walk(tandem(), "tandem")
    walk(engine(), "tandem-engine")
    walk(operator(), "tandem-operator")
    return found


def strings() -> list[str]:
    """Every string of the product but docstrings: flags, routes, keys, series, messages."""
    found: set[str] = set()
    for path in sources():
        if path.name.endswith("_pb2.py"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        found |= {
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
        }
    return sorted(found)


def imports() -> tuple[dict[str, list[str]], dict[str, float]]:
    code = (
        "import sys, time; t = time.process_time(); import {0}; d = time.process_time() - t; "
        "print(d, *sorted({{m.split('.')[0] for m in sys.modules}} - set(sys.stdlib_module_names)))"
    )
    sets, times = {}, {}
    for entry in ENTRIES:
        best = 1e9
        for _ in range(REPEATS):
            out = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code.format(now(entry))],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            best = min(best, float(out[0]))
        sets[entry] = [m for m in out[1:] if not m.startswith("_")]
        times[entry] = best
    return sets, times


def wire() -> dict[str, str]:
    import msgspec
    from msgspec import inspect as ins

    def sample(t: ins.Type, depth: int = 0) -> object:
        match t:
            case ins.StructType(cls=cls, fields=fields):
                return cls(**{f.name: sample(f.type, depth + 1) for f in fields if f.required or depth < 3})
            case ins.UnionType(types=types):
                some = [x for x in types if not isinstance(x, ins.NoneType)]
                return sample(some[0], depth + 1) if depth < 4 else None
            case ins.ListType(item_type=x) | ins.CollectionType(item_type=x):
                return [sample(x, depth + 1)]
            case ins.VarTupleType(item_type=x):
                return (sample(x, depth + 1),)
            case ins.TupleType(item_types=xs):
                return tuple(sample(x, depth + 1) for x in xs)
            case ins.DictType(key_type=k, value_type=v):
                return {sample(k, depth + 1): sample(v, depth + 1)}
            case ins.SetType(item_type=x) | ins.FrozenSetType(item_type=x):
                return frozenset({sample(x, depth + 1)})
            case ins.EnumType(cls=cls):
                return next(iter(cls))
            case ins.LiteralType(values=values):
                return values[0]
            case ins.IntType(ge=ge, gt=gt):
                return max(1, ge or 0, (gt or 0) + 1)
            case ins.FloatType():
                return 0.5
            case ins.BoolType():
                return True
            case ins.StrType():
                return "a"
            case ins.BytesType():
                return b"b"
            case ins.NoneType():
                return None
        return "any"

    found = {}
    for path in sorted(Path("engine/tandem_engine/messages").glob("*.py")):
        module = importlib.import_module(dotted(str(path)))
        for name, cls in vars(module).items():
            if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__:
                try:
                    found[name] = msgspec.msgpack.encode(sample(ins.type_info(cls))).hex()
                except Exception as error:  # noqa: BLE001
                    found[name] = f"{type(error).__name__}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    def put(name: str, what: object) -> None:
        text = what if isinstance(what, str) else json.dumps(what, indent=1, sort_keys=True, ensure_ascii=False)
        (out / name).write_text(text + "\n", "utf-8")

    started = time.monotonic()
    put("tests.json", tests())
    put("strings.json", strings())
    put("help.json", helps())
    put("wire.json", wire())
    import tandem_engine

    put("public.json", {n: type(getattr(tandem_engine, n)).__name__ for n in tandem_engine.__all__})
    traits = load("tandem_services.gateway.openapi.document", "Traits")
    import inspect

    fields = inspect.signature(traits).parameters  # type: ignore[arg-type]
    put(
        "openapi.json",
        load("tandem_services.gateway.openapi.document", "openapi_document")(traits(**dict.fromkeys(fields, True))),
    )  # type: ignore[operator]
    put("redis.lua", load("tandem_services.router.library", "library_source")().text)  # type: ignore[operator]
    put(
        "crds.yaml",
        subprocess.run(
            [sys.executable, "-m", "tandem_operator.api.crds"], check=True, capture_output=True, text=True
        ).stdout,
    )
    put(
        "data.txt",
        "\n".join(
            sorted(str(p) for r in ROOTS for p in Path(r).rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc"))
        ),
    )
    if not REPEATS:
        return
    sets, times = imports()
    put("imports.json", sets)
    (out.parent / f"{out.name}-times.json").write_text(json.dumps(times, indent=1))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
