"""What a process that a test starts imports, without a PYTHONPATH of the test's own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
import tandem_engine, tandem_operator, tandem_services, tandem_testing
print(tandem_engine.__file__, tandem_operator.__file__, tandem_services.__file__, tandem_testing.__file__)
"""


def test_child_process_imports_packages_of_this_tree(tmp_path):
    found = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    packages = [Path(file).parent.parent.relative_to(ROOT) for file in found.stdout.split()]
    assert [str(each) for each in packages] == ["engine", "operator", "services", "tests/support"]
