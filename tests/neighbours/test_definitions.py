"""Stored definitions of neighbours are what the packages on npm have."""

import shutil
import subprocess
import sys

import pytest
import yaml

from tandem_testing.api_schemas import NEIGHBOURS, ROOT
from tandem_testing.neighbours import NEEDS_NEIGHBOURS

pytestmark = [*NEEDS_NEIGHBOURS, pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")]


def test_stored_definitions_are_those_of_the_packages(tmp_path):
    command = [sys.executable, str(ROOT / "tools/neighbours/write_crds.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    generated = {path.name for path in tmp_path.iterdir()}
    assert generated == {
        path.name
        for path in NEIGHBOURS.glob("*.yaml")
        if "tandem.dev/package" in yaml.safe_load(path.read_text())["metadata"].get("annotations", {})
    }
    for name in generated:
        assert (tmp_path / name).read_text() == (NEIGHBOURS / name).read_text(), "run: tools/neighbours/write_crds.py"
