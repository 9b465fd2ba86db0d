"""Every code of an error has a row on the page for troubleshooting."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
CLASSES = ("engine/tandem_engine/base/errors.py", "services/tandem_services/common/errors.py")
GATEWAY = ROOT / "services/tandem_services/gateway"
RAISED = {"ApiError", "bad_request", "not_found", "conflict"}
"""What makes an error for clients, with a `reason`."""


def nodes(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text("utf-8")))


def class_codes() -> Iterator[str]:
    """`code` of each class of errors."""
    for name in CLASSES:
        for node in nodes(ROOT / name):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and target.id == "code":
                    yield str(node.value.value)


def gateway_codes() -> Iterator[str]:
    """Literal reasons of errors that the gateway makes."""
    for file in GATEWAY.rglob("*.py"):
        for node in nodes(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
                given = (each.value for each in node.keywords if each.arg == "reason")
                yield from (str(value.value) for value in given if isinstance(value, ast.Constant))


def rows() -> set[str]:
    """Codes in first cells."""
    first = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {code for cell in first for code in re.findall(r"`([a-z_]+)`", cell)}


def test_every_error_code_has_a_row():
    known = {*class_codes(), *gateway_codes(), "context_length_exceeded"}
    assert {"config_error", "rate_limit_exceeded", "session_exists"} <= known
    assert known - rows() == set()
