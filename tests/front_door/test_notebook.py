"""The notebook of the examples: its cells run in order, from its folder, and show the start's progress."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/notebook/first_answer.ipynb"

pytestmark = pytest.mark.slow


def code_cells() -> list[str]:
    """Sources of the cells with code. What a run has left in the file is an error."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
    return ["".join(cell["source"]) for cell in cells]


PROGRAM = """\
import json, sys
scope = {}
for cell in json.load(sys.stdin):
    exec(compile(cell, "cell", "exec"), scope)
"""
"""Each cell is compiled by itself, as a kernel of Jupyter does."""


def test_notebook_runs_to_its_end_and_shows_progress():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(code_cells()),
        cwd=NOTEBOOK.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Once upon a time")
    assert any(line.startswith("The fox") for line in lines)
    assert "100%" in done.stderr
