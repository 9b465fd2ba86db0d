"""Starts of a new user, from a wheel: `make front-door`.

    A1  the bundled model, for the first time: its kernels are in the wheel
    A1  the same without them: kernels are compiled
    A2  again
    A3  a model that is not in the cache, offline: status 2 and one sentence
    A4  a model of a hub on loopback, pulled, then served offline: kernels of another dtype are compiled
    A6  `tandem doctor` finds nothing that keeps it from serving

The wheel has the kernels of this machine's kind of CPU alone (tools/kernel_packs.sh, which this runs). It is unpacked
into a new environment, which finds what it requires in the environment that runs this. HOME is empty, and the
environment is read-only for all but root. Limits have room for a busy machine; a start that exceeds its limit fails.
CPU seconds, of all processes of a start, depend less on what else the machine does.
"""

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

from tandem_engine.kernels.cpu.target import TARGETS, target
from tandem_testing.hub_server import HubServer, hub_server

ROOT = Path(__file__).resolve().parents[1]
FIRST_S, AGAIN_S = 240, 30
"""Limits of a start that compiles kernels, and of one that has them."""

MAX_WHEEL_BYTES = 15 << 20
PACKS = "tandem_engine/kernels/store/packs"

RUN = "import sys; from tandem_services.cli.start import tandem; sys.exit(tandem())"


def main() -> int:
    """Returns the exit status: 0 if every start went as it should."""
    with tempfile.TemporaryDirectory(prefix="tandem-front-door-") as folder, hub_server() as hub:
        place = Path(folder)
        site = install(place)
        user = User(python=place / "env" / "bin" / "python", home=place / "home", hub=hub)
        hub.add("org/mini", ROOT / "models" / "tandem-mini")
        start = ("serve", "--port", "0", "--exit-when-ready", "--ready-timeout")
        if target().name in TARGETS:
            user.require("A1 packs", 0, *start, str(AGAIN_S))
            user.require_nothing_compiled()
            (site / PACKS).parent.chmod(0o755)
            (site / PACKS).chmod(0o755)
            shutil.rmtree(site / PACKS)
        user.require("A1", 0, *start, str(FIRST_S))
        user.require("A2", 0, *start, str(AGAIN_S))
        user.require("A3", 2, "serve", "Qwen/Qwen3-0.6B", "--offline")
        user.require("A4 pull", 0, "pull", "org/mini")
        user.require("A4 serve", 0, "serve", "org/mini", *start[1:], str(FIRST_S), HF_HUB_OFFLINE="1")
        user.require("A6", 0, "doctor", "--json", "--port", "0")
        return 0 if not user.failed else 1


def install(place: Path) -> Path:
    """The packages of an environment with the wheel of this checkout and nothing else of it."""
    packs = (str(ROOT / "tools" / "kernel_packs.sh"),)
    make = ("--target", target().name) if target().name in TARGETS else ("--clear",)
    subprocess.run((*packs, *make), check=True, env=os.environ | {"TANDEM_VENV": sys.prefix})
    try:
        wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT))
        subprocess.run(wheel, check=True)
    finally:
        subprocess.run((*packs, "--clear"), check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "env")], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place / "env")}))
    archive_path = next(place.glob("*.whl"))
    size = archive_path.stat().st_size
    print(f"{archive_path.name}: {size / (1 << 20):.1f} MiB", flush=True)
    if size > MAX_WHEEL_BYTES:
        raise SystemExit(f"the wheel is larger than {MAX_WHEEL_BYTES >> 20} MiB")
    with zipfile.ZipFile(archive_path) as archive:
        archive.extractall(site)
    (site / "required.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    for path in (site, *site.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return site


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
        began, cpu_before = time.monotonic(), cpu_seconds()
        result = subprocess.run(
            command, check=False, env=self.environment | variables, cwd=self.home, capture_output=True, text=True
        )
        seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu_before
        good = result.returncode == status
        self.failed |= not good
        verdict, words_given = "passed" if good else "FAILED", " ".join(words)
        print(f"{name:<9} {verdict}  {seconds:5.1f} s, {cpu:4.1f} of CPU  tandem {words_given}", flush=True)
        if not good or status:
            print(result.stdout + result.stderr, flush=True)

    def require_nothing_compiled(self) -> None:
        """That the starts so far have compiled no kernel."""
        compiled = [path.name for path in (self.home / ".cache" / "tandem" / "kernels").glob("*.kernel")]
        if compiled:
            self.failed = True
            print(f"FAILED: not in the wheel: {', '.join(sorted(compiled))}", flush=True)


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
