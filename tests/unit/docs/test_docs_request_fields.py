"""docs/request-fields.md against the gateway's table."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_page_of_request_fields_is_up_to_date():
    tool = ROOT / "tools" / "request_fields.py"
    written = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / "request-fields.md").read_text() == written.stdout
