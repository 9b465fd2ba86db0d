# ruff: noqa: ANN001, ANN201, ANN202, ARG001, ARG002, E501, N815, PLC0206, PLC0207, RET504, RUF021, RUF059, RUF100, SIM102, SIM114
"""Small edits that no rule of `apply.py` makes: (file, old text, new text), each found once before or done already."""

import ast
import re
import shutil
from pathlib import Path

PATCHES: list[tuple[str, str, str]] = []


def edit(path: str, old: str, new: str) -> None:
    PATCHES.append((path, old, new))


def drop(path: str, text: str) -> None:
    PATCHES.append((path, text, ""))


CLI = "engine/tandem_engine/cli.py"
drop(
    CLI,
    "verify   compare with transformers, token by token\nbench    offline throughput and latency against transformers\naccuracy what fewer bits of weights and KV cost, on a text\n",
)
drop(CLI, "    _add_verify(commands)\n    _add_bench(commands)\n    _add_accuracy(commands)\n")
FLAGS = "engine/tandem_engine/config/flags/__init__.py"
drop(FLAGS, "from tandem_lab.cli.accuracy import accuracy_argv, add_accuracy_flags\n")
drop(FLAGS, '    "accuracy_argv",\n    "add_accuracy_flags",\n')
edit(
    FLAGS,
    """    compute, parallel, cache, host, scheduler, operation, speculative, transfer, grammar
                one group of help each: its flags, and the part of `config` that they make
    shared      flags that other commands have too
    accuracy    the table of `tandem accuracy`
    values      what flags take; argv: parsed flags as arguments again
""",
    """    cache, scheduler
                further groups of help: their flags, and the parts of `config` that they make
    types       what flags take, flags that other commands have too, and parsed flags as arguments again
""",
)
LAB_MAIN = "lab/tandem_lab/__main__.py"
edit(
    LAB_MAIN,
    "import argparse\n",
    '''"""`python -m tandem_lab`: the commands of the lab that compute, each in a process of its own.

verify   compare with transformers, token by token
bench    offline throughput and latency against transformers
accuracy what fewer bits of weights and KV cost, on a text
"""

import argparse
import sys
from collections.abc import Sequence

from tandem_engine.base.environment import read_environment
from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.base.extras import full_disk, missing_extra
from tandem_engine.base.logs import LogFormat, configure_logging
from tandem_engine.cli import exit_now
''',
)
edit(
    LAB_MAIN,
    """def _add_verify(commands""",
    '''def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tandem_lab", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_verify(commands)
    _add_bench(commands)
    _add_accuracy(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    configure_logging(LogFormat.PLAIN, level=read_environment().level)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 3
    except (ModuleNotFoundError, OSError) as error:
        sentence = missing_extra(error) if isinstance(error, ModuleNotFoundError) else full_disk(error)
        if sentence is None:
            raise
        print(f"tandem: error: {sentence}", file=sys.stderr)
        return 3


def _add_verify(commands''',
)
APPENDED = {
    LAB_MAIN: """

if __name__ == "__main__":
    exit_now(main())
""",
    "tests/unit/services/cli/test_missing_extras.py": """

def test_command_of_the_lab_where_it_is_missing_names_it(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command.main(["verify", "--quick", "--json", "x"]) == 3
    assert "tandem_lab is not installed here: pip install 'tandem[lab]'" in capsys.readouterr().err
""",
    "tests/test_layout.py": """

def modules() -> list[Path]:
    found = [p for part, package in PACKAGES.items() for p in (ROOT / part / package).rglob("*.py")]
    return [p for p in found if not p.name.endswith("_pb2.py")]


def test_no_module_is_longer_than_500_lines() -> None:
    assert [str(p) for p in modules() if p.read_text("utf-8").count("\\n") > 500] == []


def test_no_folder_holds_more_than_25_modules() -> None:
    folders = Counter(str(p.parent) for p in modules() if p.name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > 25} == {}
""",
}
TEST_FOLDERS = {
    "tests/unit/engine/accuracy": "tests/unit/lab/accuracy",
    "tests/unit/engine/bench": "tests/unit/lab/offline",
    "tests/unit/services/loadgen": "tests/unit/lab/bench",
    "tests/unit/services/simulate": "tests/unit/lab/simulate",
}
for command in ("accuracy", "bench", "verify"):
    edit(f"lab/tandem_lab/cli/{command}.py", '"tandem_engine.cli", "' + command, '"tandem_lab", "' + command)
edit("lab/tandem_lab/accuracy.py", '.with_name("text.txt")', '.with_suffix(".txt")')
MAIN = "services/tandem_services/cli/main.py"
edit(
    MAIN,
    """`run` (imports what it needs).
\"\"\"
""",
    """`run` (imports what it needs). Those of `tandem_lab`, which compare and measure, are found where it is installed.
\"\"\"
""",
)
edit(
    MAIN,
    "from importlib.metadata import version\n",
    "from importlib import import_module\nfrom importlib.metadata import version\nfrom importlib.util import find_spec\nfrom types import ModuleType\n",
)
drop(MAIN, "from tandem_lab.cli import accuracy, bench, simulate, verify\n")
edit(
    MAIN,
    "from tandem_services.cli.entry import TeachingParser, run_command",
    "from tandem_services.cli.entry import TeachingParser, run_command\nfrom tandem_services.common.errors import StartupError",
)
edit(
    MAIN,
    "COMMANDS = (up, chat, bench, verify, accuracy, simulate, gateway, router, worker, ctl, k8s, quarantine, keys)\n",
    '''LAB = ("bench", "verify", "accuracy", "simulate")
"""Commands of `tandem_lab`: an image that only serves has no lab."""
COMMANDS: tuple[ModuleType | str, ...] = (up, chat, *LAB, gateway, router, worker, ctl, k8s, quarantine, keys)
''',
)
edit(
    MAIN,
    "        command.add_parser(commands)\n    return parser\n",
    """        if isinstance(command, ModuleType):
            command.add_parser(commands)
        elif find_spec("tandem_lab") is None:
            missing = commands.add_parser(command, help="not installed", add_help=False, prefix_chars="\\0")
            missing.add_argument("options", nargs="*")  # whatever they are
            missing.set_defaults(run=_no_lab)
        else:
            import_module(f"tandem_lab.cli.{command}").add_parser(commands)
    return parser


def _no_lab(_: argparse.Namespace) -> int:
    raise StartupError("tandem_lab is not installed here: pip install \'tandem[lab]\'")
""",
)
PROJECT = "pyproject.toml"
edit(PROJECT, "reference = [\n    # `tandem verify` and", "lab = [\n    # `tandem verify` and")
edit(PROJECT, "tandem[engine,operator,otel,reference,router]", "tandem[engine,lab,operator,otel,router]")
edit(PROJECT, '"operator/tandem_operator"]', '"operator/tandem_operator", "lab/tandem_lab"]')
edit(
    PROJECT,
    'pythonpath = ["engine", "services", "operator", "tests/support"]',
    'pythonpath = ["engine", "services", "operator", "lab", "tests/support"]',
)
edit(
    PROJECT,
    'src = ["engine", "services", "operator", "tests/support", "tools/kube"]',
    'src = ["engine", "services", "operator", "lab", "tests/support", "tools/kube"]',
)
edit(
    PROJECT,
    'mypy_path = ["engine", "services", "operator", "tools/kube", "benchmarks", "tests/support"]',
    'mypy_path = ["engine", "services", "operator", "lab", "tools/kube", "benchmarks", "tests/support"]',
)
edit(
    PROJECT,
    'packages = ["tandem_engine", "tandem_services", "tandem_operator", "gpu", "peers"]',
    'packages = ["tandem_engine", "tandem_services", "tandem_operator", "tandem_lab", "gpu", "peers"]',
)
edit(PROJECT, '"lab/tandem_lab/verify/**" = ["T20"]\n', '"lab/tandem_lab/**" = ["T20"]\n')
drop(PROJECT, '"lab/tandem_lab/bench/**" = ["T20"]\n')
drop(PROJECT, '"engine/tandem_engine/accuracy/**" = ["T20"]\n')
edit("engine/tandem_engine/base/extras.py", '"reference": ("transformers",)', '"lab": ("transformers",)')

for test in (
    "unit/lab/accuracy/test_accuracy_command",
    "unit/lab/offline/test_offline_bench",
    "numerics/test_bfloat16_bounds",
    "numerics/test_exactness_matrix",
):
    edit(f"tests/{test}.py", "from tandem_engine.cli import main\n", "from tandem_lab.__main__ import main\n")
edit(
    "tests/unit/services/cli/test_missing_extras.py",
    '("tandem_engine.cli:main", ["verify"',
    '("tandem_lab.__main__:main", ["verify"',
)
edit(
    "tests/unit/docker/test_docker_images.py",
    '{module.__name__.rpartition(".")[2] for module in COMMANDS}',
    '{getattr(command, "__name__", str(command)).rpartition(".")[2] for command in COMMANDS}',
)
edit("docs/models.md", "`tandem[reference]`", "`tandem[lab]`")
edit("engine/tandem_engine/model/checkpoint.py", "install tandem[reference]", "install tandem[lab]")
DOCKER = "docker/Dockerfile"
edit(
    DOCKER,
    "COPY operator/tandem_operator operator/tandem_operator\n",
    "COPY operator/tandem_operator operator/tandem_operator\nCOPY lab/tandem_lab lab/tandem_lab\n",
)
edit(".dockerignore", "!engine/tandem_engine\n", "!engine/tandem_engine\n!lab/tandem_lab\n")
edit(
    "tests/test_address_layout.py",
    '"operator/tandem_operator")\nADDRESSES',
    '"operator/tandem_operator", "lab/tandem_lab")\nADDRESSES',
)
edit(
    "tests/test_layout.py",
    '    "operator": "tandem_operator",\n}',
    '    "operator": "tandem_operator",\n    "lab": "tandem_lab",\n}',
)
edit(
    "tests/chaos/test_chaos_harness.py",
    'for part in ("engine", "services", "operator") for path',
    'for part in ("engine", "services", "operator", "lab") for path',
)

edit(
    "engine/tandem_engine/model/families.py",
    "the reading of those facts from its config.json, and has a file of its own under `families`.",
    "the reading of those facts from its config.json.",
)

for dtype in ("cuda      float32", "cuda --dtype bfloat16"):
    edit(
        "docs/gpu.md",
        f"tandem-engine verify --model PATH --device {dtype}",
        f"tandem verify --model PATH --device {dtype}",
    )

EXTRAS_TEST = "tests/unit/services/cli/test_missing_extras.py"
edit(
    EXTRAS_TEST,
    "from tandem_services.cli import entry\n",
    "from tandem_services.cli import entry\nfrom tandem_services.cli import main as command\n",
)
edit(EXTRAS_TEST, "from tandem_engine import cli\n", "from tandem_lab import __main__ as cli\n")
edit(
    EXTRAS_TEST,
    '"tandem-engine: error: no space left on the disk for /data/table.json',
    '"tandem: error: no space left on the disk for /data/table.json',
)

JIT = "engine/tandem_engine/kernels/cpu/jit.py"
edit(
    JIT,
    """def compiled(
    function: Callable[..., Any], *, nogil: bool = True, made_of: Sequence[ModuleType] = (), **options: Any
) -> Any:""",
    "def compiled(function: Callable[..., Any], *, nogil: bool = True, **options: Any) -> Any:",
)
edit(
    JIT,
    "    `made_of`: modules whose constants or functions become part of the code. numba knows the file of `function` alone.\n",
    "    numba knows the file of `function` alone: constants and functions that become part of the code stand there too.\n",
)
edit(JIT, "CodeFiles(function, revision=revision_of(*made_of))", "CodeFiles(function)")
edit(
    JIT,
    "made of pieces of other files closes over this, or it would be loaded as it was before they changed; `compiled`\n    keeps it beside the code. `constant` is one of theirs that the machine decides.",
    "made of pieces of other files closes over this, or it would be loaded as it was before they changed. `constant` is\n    one of theirs that the machine decides.",
)
edit(JIT, "from collections.abc import Callable, Sequence\n", "from collections.abc import Callable\n")
FILES = "engine/tandem_engine/kernels/cpu/code_files.py"
edit(
    FILES,
    """    \"\"\"numba's cache of one function. Raises `RuntimeError` where no folder for it can be written.

    `revision`: of what the function takes from other files. Code that was kept with another is compiled again.
    \"\"\"

    def __init__(self, function: Callable[..., Any], *, revision: int = 0) -> None:""",
    """    \"\"\"numba's cache of one function. Raises `RuntimeError` where no folder for it can be written.\"\"\"

    def __init__(self, function: Callable[..., Any]) -> None:""",
)
edit(
    FILES,
    "source_stamp=(self._impl.locator.get_source_stamp(), revision),",
    "source_stamp=self._impl.locator.get_source_stamp(),",
)


def revisions(text: str) -> str:
    """Lists of modules that kernels are made of name each file once, and not the one that they stand in."""
    text = text.replace(", made_of=[sys.modules[__name__]]", "")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "revision_of":
            names = list(dict.fromkeys(ast.unparse(a) for a in node.args if ast.unparse(a) != "sys.modules[__name__]"))
            names += [f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords]
            old = ast.get_source_segment(text, node)
            assert old is not None
            text = text.replace(old, f"revision_of({', '.join(names)})")
    for found in re.findall(r"^PIECES = \((.*)\)$", text, re.M):
        text = text.replace(found, ", ".join(dict.fromkeys(found.split(", "))))
    text = re.sub(r"(revision_of\(.*\))  # fmt: skip", r"\1", text)
    return text


edit(
    "tools/words.py",
    '("engine", "services", "operator", "charts"',
    '("engine", "services", "operator", "lab", "charts"',
)
edit(
    "Makefile",
    "$(addprefix tests/unit/services/,cli common loadgen router router_server simulate worker)",
    "tests/unit/lab/bench tests/unit/lab/simulate $(addprefix tests/unit/services/,cli common router router_server worker)",
)
edit(
    "tests/test_layout.py",
    "import ast\nimport subprocess\nimport sys\n",
    "import ast\nimport subprocess\nimport sys\nfrom collections import Counter\n",
)
edit(
    "tests/test_layout.py",
    '        "tandem_services.worker.main",\n',
    '        "tandem_services.worker.main",\n        "tandem_lab.cli.verify",\n        "tandem_lab.simulate.run",\n',
)
edit("tools/words.py", '"accuracy/text.txt"', '"tandem_lab/accuracy.txt"')
edit(PROJECT, '"import-linter>=2.3,<3"', '"import-linter>=2.16,<3"')
edit(
    "CHANGELOG.md",
    "### Changed\n",
    "### Changed\n"
    "- `tandem verify`, `accuracy`, `bench` and `simulate` are a package of the wheel beside the product, `tandem_lab`: the extra\n"
    "  `reference` is now `lab`, and `tandem-engine` has `serve`, `follow` and `rank` alone. Modules have other paths; the names of\n"
    "  `tandem_engine.__all__`, commands and HTTP have not changed.\n",
)
edit(
    "CONTRIBUTING.md",
    "- `services/README.md` does the same for gateway, router, worker service and command line.\n",
    "- `services/README.md` does the same for gateway, router, worker service and command line.\n"
    "- `operator/README.md` does it for the operator; `lab/README.md` has what compares and measures.\n"
    "- A file is one idea that a reader would look for by its name, of 80 to 500 lines; a folder is one layer or one contract, of 25\n"
    "  files at most. A helper stands in the lowest folder that all its users see.\n",
)
edit(
    "docs/architecture.md",
    "[engine](../engine/README.md), [services](../services/README.md) and [operator](../operator/README.md); for terms the\n[glossary](glossary.md).\n",
    "[engine](../engine/README.md), [services](../services/README.md), [operator](../operator/README.md) and [lab](../lab/README.md); for\n"
    "terms the [glossary](glossary.md).\n",
)

SECTIONS = (
    ("engine/README.md", "## Layers\n", "## ", "engine-layers.txt"),
    ("engine/README.md", "## Where does my class go\n", "## ", "engine-where.txt"),
    ("services/README.md", "# The services\n", "## Life of a request", "services-head.txt"),
)
"""(page, beginning, what follows, text) of pages that describe the tree."""


def paths(root: Path, texts: dict[str, str]) -> None:
    """Scripts that name the folders of the packages name the lab's too."""
    for file in (root / "benchmarks").rglob("*.py"):
        name = str(file.relative_to(root))
        text = texts.get(name) or file.read_text("utf-8")
        new = re.sub(
            r'\("engine", "services", ("operator", )?(?="tests/support")', r'("engine", "services", \1"lab", ', text
        )
        if new != text:
            texts[name] = new
    for file in (root / "tools").glob("*.sh"):
        text = file.read_text("utf-8")
        new = re.sub(r"((?:\$here/)?)operator:(?=\1tests/support)", r"\1operator:\1lab:", text)
        if new != text:
            texts[str(file.relative_to(root))] = new


DOCS = {
    "engine/tandem_engine/kernels/cpu/attention_work.py": """Pieces of attention that kernels of a CPU share, and how the work of a step is cut into tasks.

numba keeps compiled code on disk, keyed by source file and by the constants a function closes over. Head sizes are
such constants: LLVM then unrolls and vectorizes the loops over head_dim. So is whether scores are capped: kernels for
models that do not cap hold no trace of it.

`cut_queries` makes the work list of a step, `group_tasks` finds the tasks that are computed together. Both are compiled
and, unlike the kernels, do not let go of the interpreter lock, as some of numpy's functions do not: they run at the
start of a step, see `forward.future_map`.

Tasks of one group read the same pages. Requests with a common prefix have the same pages for it, as have a token and
the drafts behind it. One after the other they would each bring these pages from memory again. A group of them goes
through the pages once, tile by tile, until their pages part; then each continues alone. What is computed for a member
is the same, operation for operation, as if it were alone.

A page has one place in any sequence, so members are found by the first page of their chunk. How far they go together is
seen by comparing pages.
""",
    "engine/tandem_engine/kernels/cpu/pieces.py": """How kernels of a CPU, and the pieces that they are made of, are compiled and kept.

numba finds code again by the constants that a function closes over. Among them may be functions that are compiled with
it, and of those it takes an identity that is another in each process: such a kernel would be compiled at every start,
for ten seconds, and its code kept each time. Here they do not count. What tells their code apart has to be among the
constants: `revision_of` their sources, and the numbers that they were made for.
""",
}
"""Docstrings of merged modules whose sources introduced themselves in ways that no longer fit."""
edit(
    "services/tandem_services/router/policies.py",
    "One policy for each role, in a small file each.",
    "One policy for each role.",
)
edit(
    "engine/tandem_engine/base/logs.py",
    " to stderr, which nobody waits for (`logs`), or to",
    " to stderr, which nobody waits for, or to",
)
edit("engine/tandem_engine/speculative/adaptive_length.py", "same (`adaptive_length`), and", "same, and")
edit("services/tandem_services/gateway/observe/explain.py", "`explain` keeps them. They hold", "They hold")


def docstrings(root: Path, texts: dict[str, str]) -> None:
    for path, new in DOCS.items():
        text = texts.get(path) or (root / path).read_text("utf-8")
        old = ast.get_source_segment(text, ast.parse(text).body[0])
        assert old is not None
        assert old.startswith('"""'), path
        texts[path] = text.replace(old, f'"""{new}"""', 1)


def pages(root: Path, here: Path, texts: dict[str, str]) -> None:
    for path, start, end, name in SECTIONS:
        text = texts.get(path) or (root / path).read_text("utf-8")
        new = (here / "docs" / name).read_text("utf-8")
        if new in text:
            continue
        first = text.find(start)
        last = text.find("\n" + end, first + 1) + 1
        if first < 0 or not last:
            print(f"page: {path} has no {start.strip()!r} before {end!r}")
            continue
        texts[path] = text[:first] + new + text[last:]
    texts["lab/README.md"] = (here / "docs/lab.txt").read_text("utf-8")
    (root / "lab").mkdir(exist_ok=True)
    (root / "lab/README.md").touch()


COMPILED_TEST = "tests/unit/engine/test_compiled.py"
ONE_FILE = '''

def names_from_elsewhere(kernel) -> set[str]:
    """Names of other modules that the code of a compiled function, or of one that it calls, takes in."""
    function = kernel.py_func
    source = ast.parse(Path(function.__code__.co_filename).read_text("utf-8"))
    ours = [n for n in ast.walk(source) if isinstance(n, ast.ImportFrom) and str(n.module).startswith("tandem_")]
    found = set(function.__code__.co_names) & {a.asname or a.name for n in ours for a in n.names}
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if name not in found and is_jitted(called):
            found |= names_from_elsewhere(called)
    return found


@pytest.mark.parametrize(
    "kernel", [cut_queries, shared_end, listed, group_tasks, sampled_digests, full_digests, _describe, _find]
)
def test_code_that_is_kept_takes_nothing_from_other_files(kernel):
    """It is found again by its own file alone, and would compute with what the other one had before a change."""
    assert names_from_elsewhere(kernel) == set()


def test_code_that_takes_in_another_file_is_found_out(tmp_path, monkeypatch):
    (tmp_path / "user.py").write_text(
        "import numba\\nfrom tandem_engine.kernels.cpu.attention_work import CHUNK\\n\\n"
        "@numba.njit\\ndef inner(x):\\n    return x * CHUNK\\n\\n@numba.njit\\ndef outer(x):\\n    return inner(x)\\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert names_from_elsewhere(importlib.import_module("user").outer) == {"CHUNK"}
'''


def compiled_tests(text: str) -> str:
    """Code of merged modules stands in one file: the test that files are named becomes one that none has to be."""
    text = text[: text.index("\n\ndef imported(")] + ONE_FILE
    text = text.replace("import importlib.util\n", "import ast\nimport importlib\n", 1)
    text = text.replace("import pytest\n", "import pytest\nfrom numba.extending import is_jitted\n", 1)
    return text.replace(
        "from tandem_engine.kernels.cpu.jit import compiled, revision_of\n",
        "from tandem_engine.disaggregation.nixl.layout import _describe\n"
        "from tandem_engine.kernels.cpu.attention_work import listed\n"
        "from tandem_engine.kernels.cpu.jit import revision_of\nfrom tandem_engine.sampling.sampler import _find\n",
        1,
    )


def apply(root: Path, here: Path) -> None:
    texts: dict[str, str] = {}
    for folder, new_folder in TEST_FOLDERS.items():
        for file in (root / folder).glob("*.py"):
            (root / new_folder).mkdir(parents=True, exist_ok=True)
            file.rename(root / new_folder / file.name)
        shutil.rmtree(root / folder, ignore_errors=True)
    for path, old, new in PATCHES:
        file = root / path
        if path not in texts:
            if not file.exists():
                print(f"patch: no {path}")
                continue
            texts[path] = file.read_text("utf-8")
        text = texts[path]
        if new and new in text and (old not in text or old in new):
            continue  # done before
        if path == LAB_MAIN and old == "import argparse\n" and "`python -m tandem_lab`: the commands" in text:
            continue  # done before, and its imports sorted since
        if old not in text:
            if new:
                print(f"patch: {path} has no {old[:70]!r}")
            continue
        texts[path] = text.replace(old, new, 1)
    for path, end in APPENDED.items():
        if path in texts and end.strip() not in texts[path]:
            texts[path] = texts[path].rstrip() + "\n" + end
    for file in [
        *root.glob("engine/tandem_engine/kernels/cpu/*.py"),
        root / "engine/tandem_engine/disaggregation/digest_words.py",
    ]:
        name = str(file.relative_to(root))
        if file.exists() and ("revision_of(" in file.read_text("utf-8") or "made_of" in file.read_text("utf-8")):
            texts[name] = revisions(texts.get(name) or file.read_text("utf-8"))
    pages(root, here, texts)
    docstrings(root, texts)
    paths(root, texts)
    test = (root / COMPILED_TEST).read_text("utf-8")
    if "\n\ndef imported(" in test:
        texts[COMPILED_TEST] = compiled_tests(test)
    marker = root / "lab/tandem_lab/py.typed"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    for path, text in texts.items():
        if (root / path).read_text("utf-8") != text:
            (root / path).write_text(text, "utf-8")
    for name, target in (("importlinter.ini", ".importlinter"),):
        if (here / name).exists():
            shutil.copyfile(here / name, root / target)
