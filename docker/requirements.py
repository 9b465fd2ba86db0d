"""Print what pyproject.toml requires, one line each: `requirements.py EXTRA...`. Extras of ourselves are left out."""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Of the project and of these extras. Raises `KeyError` for an extra that there is not."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
