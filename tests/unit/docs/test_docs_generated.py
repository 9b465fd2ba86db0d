"""Pages that a tool writes from the code are what it prints now."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("page", "tool"), [("request-fields.md", "request_fields.py"), ("flags.md", "flags_page.py")])
def test_generated_page_is_up_to_date(page: str, tool: str) -> None:
    printed = subprocess.run([sys.executable, ROOT / "tools" / tool], capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == printed.stdout
