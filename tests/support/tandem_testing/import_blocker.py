"""Child processes in which some modules are not installed, as far as they can tell."""

from pathlib import Path

_SITE = """\
import sys

BLOCKED = {modules!r}


class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


if {exempt!r} not in sys.orig_argv:
    sys.meta_path.insert(0, Blocker)
"""


def write_import_blocker(folder: Path, *modules: str, exempt: str = "") -> Path:
    """Write a `sitecustomize` that hides `modules`; put the returned folder on PYTHONPATH.

    A process with the word `exempt` on its command line sees everything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE.format(modules=modules, exempt=exempt), "utf-8")
    return folder
