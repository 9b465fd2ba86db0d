"""Type checks look at every benchmark: a call of what does not exist any more is found before it is run."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_benchmark_is_in_both_lists_of_mypy():
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    scripts = {script.stem for script in (ROOT / "benchmarks").glob("*.py")}
    (loose,) = [each["module"] for each in mypy["overrides"] if "peers.*" in each["module"]]
    assert scripts - set(mypy["modules"]) == set()
    assert scripts - set(loose) == set()
