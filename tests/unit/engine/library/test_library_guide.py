"""Python examples of pages run as they are printed there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
EXAMPLES = {
    f"{page}-{number}": code
    for page in ("docs/library.md", "docs/cpu-kernels.md", "README.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL))
    if "tandem_engine" in code
}
RUN = """
import json, os, sys
import numba, torch
import tandem_engine.engine  # with all that examples import, once

ended = {}
for name, code in json.load(sys.stdin).items():
    child = os.fork()
    if not child:
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{name.replace('/', '-')}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
        sys.exit()
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""


def test_library_guide_has_seven_examples() -> None:
    assert len(EXAMPLES) == 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def ended(folder) -> dict[str, int]:
    """Exit status of each example. Each runs in a process of its own, a copy of one that has imported the engine."""
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(folder)],
        cwd=ROOT,
        input=json.dumps(EXAMPLES),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    statuses: dict[str, int] = json.loads(run.stdout)
    return statuses


@pytest.mark.timeout(600)  # all of them, in the first
@pytest.mark.parametrize("name", EXAMPLES)
def test_guide_example_exits_with_zero_and_prints(name, ended, folder) -> None:
    out, err = ((folder / f"{name.replace('/', '-')}.{stream}").read_text() for stream in ("out", "err"))
    assert ended[name] == 0, err
    assert out.strip()
