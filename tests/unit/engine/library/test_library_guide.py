"""Python examples of pages run as they are printed there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
EXAMPLES = [
    (f"{page}-{number}", code)
    for page in ("docs/library.md", "docs/cpu-kernels.md", "README.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL))
    if "tandem_engine" in code
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_an_example_runs(code) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
