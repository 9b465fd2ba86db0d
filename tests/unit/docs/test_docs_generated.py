"""Pages that a tool writes from the code are what it prints now."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


PAGES = [
    ("request-fields.md", "request_fields.py"),
    ("flags.md", "flags_page.py"),
    ("metrics.md", "metrics_page.py"),
    ("models.md", "family_table.py"),
    ("kubernetes-releases.md", "kubernetes_page.py"),
]


@pytest.mark.parametrize(("page", "tool"), PAGES)
def test_generated_page_is_up_to_date(page: str, tool: str) -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "support"), *sys.path])
    command = [sys.executable, ROOT / "tools" / tool]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == printed.stdout
