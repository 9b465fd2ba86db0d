"""Write constraints.txt: the versions with which this environment passes the tests, of all that images install.

    .venv/bin/python docker/pin.py            write it
    .venv/bin/python docker/pin.py --check    exit status 1 when it is not what would be written

Images then get what was tested. What only the CUDA build of torch requires is not in a CPU environment: `pin_cuda.py`.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from requirements import requirements

OUTPUT = Path(__file__).with_name("constraints.txt")
EXTRAS = ["engine", "operator", "otel", "router"]
"""Of which an image has some."""
BUILD = {"hatchling": "1.27.0"}
"""What builds our wheel, in an environment of its own."""
BY_PYTHON = {"async-timeout": "5.0.1"}
"""What packages require with the images' Python, Debian 12's 3.11.2, and not with that of each environment here."""
HEADER = """\
# Versions in Tandem's images. Written by docker/pin.py from an environment that passed the tests; do not edit.
"""


def pins(wanted: Iterable[str]) -> dict[str, str]:
    """Name → version, of everything that `wanted` requires, here.

    Raises:
        SystemExit: something of it is not installed.
    """
    found: dict[str, str] = {}
    waiting = [(Requirement(line), "") for line in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"pin.py: {name} is not installed here: run tools/setup.sh first") from None
        # "2.13.0+cpu" is the CPU build of 2.13.0.
        found[name] = Version(installed.version).public
        waiting += _required(installed.requires or [], requirement.extras)
    return found


def _required(lines: Iterable[str], extras: Iterable[str]) -> Iterator[tuple[Requirement, str]]:
    for line in lines:
        for extra in ("", *extras):
            yield Requirement(line), extra


def main() -> int:
    """Exit status."""
    found = {**pins(requirements(EXTRAS)), **BY_PYTHON, **BUILD}
    text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))
    if sys.argv[1:] == ["--check"]:
        return 0 if OUTPUT.read_text(encoding="utf-8") == text else 1
    OUTPUT.write_text(text, encoding="utf-8")
    print(f"{OUTPUT}: {len(found)} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
