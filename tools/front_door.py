"""Starts of a new user, from a wheel: `make front-door`.

    A1  the bundled model, for the first time: kernels are compiled
    A2  again
    A3  a model that is not in the cache, offline: status 2 and one sentence
    A4  a model of a hub on loopback, pulled, then served offline: kernels of another dtype are compiled

The wheel is unpacked into a new environment, which finds what it requires in the environment that runs this. HOME is
empty, and the environment is read-only for all but root. Limits have room for a busy machine; a start that exceeds its
limit fails.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

from tandem_testing.hub_server import HubServer, hub_server

ROOT = Path(__file__).resolve().parents[1]
FIRST_S, AGAIN_S = 240, 30
"""Limits of a start that compiles kernels, and of one that has them."""

RUN = "import sys; from tandem_services.cli.start import tandem; sys.exit(tandem())"


def main() -> int:
    """Returns the exit status: 0 if every start went as it should."""
    with tempfile.TemporaryDirectory(prefix="tandem-front-door-") as folder, hub_server() as hub:
        place = Path(folder)
        user = User(python=install(place), home=place / "home", hub=hub)
        hub.add("org/mini", ROOT / "models" / "tandem-mini")
        start = ("serve", "--port", "0", "--exit-when-ready", "--ready-timeout")
        user.require("A1", 0, *start, str(FIRST_S))
        user.require("A2", 0, *start, str(AGAIN_S))
        user.require("A3", 2, "serve", "Qwen/Qwen3-0.6B", "--offline")
        user.require("A4 pull", 0, "pull", "org/mini")
        user.require("A4 serve", 0, "serve", "org/mini", *start[1:], str(FIRST_S), HF_HUB_OFFLINE="1")
        return 0 if not user.failed else 1


def install(place: Path) -> Path:
    """The Python of an environment with the wheel of this checkout and nothing else of it."""
    wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT))
    subprocess.run(wheel, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "env")], check=True)
    python = place / "env" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place / "env")}))
    with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
        archive.extractall(site)
    (site / "required.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    for path in (site, *site.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return python


class User:
    """One with an empty home."""

    def __init__(self, *, python: Path, home: Path, hub: HubServer) -> None:
        home.mkdir()
        self.python, self.home = python, home
        self.failed = False
        self.environment = {"HOME": str(home), "PATH": os.environ["PATH"], "HF_ENDPOINT": hub.url, "LANG": "C.UTF-8"}

    def require(self, name: str, status: int, *words: str, **variables: str) -> None:
        """Run `tandem` with these words, and print how it went."""
        command = [str(self.python), "-c", RUN, *words]
        began = time.monotonic()
        result = subprocess.run(
            command, check=False, env=self.environment | variables, cwd=self.home, capture_output=True, text=True
        )
        seconds = time.monotonic() - began
        good = result.returncode == status
        self.failed |= not good
        print(f"{name:<9} {'passed' if good else 'FAILED'}  {seconds:5.1f} s  tandem {' '.join(words)}", flush=True)
        if not good or status:
            print(result.stdout + result.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
