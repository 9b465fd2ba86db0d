"""llama.cpp from PyPI: `llama-cpp-python` carries its sources, of which `llama-server` is built for this machine."""

import os
import shutil
import tarfile
from pathlib import Path

from peers.home import llama_server, llama_source
from peers.install.steps import NotInstalledError, command, is_done, mark_done, pip, venv

VERSION = "0.3.36"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def install(home: Path) -> None:
    """About ten minutes on two idle cores. Raises `NotInstalledError`."""
    folder, log = home / "llama", home / "logs" / "install-llama.log"
    want = f"llama-cpp-python {VERSION} {OPTIONS}"
    if is_done(folder, want) and llama_server(home).is_file():
        return
    for program in ("g++", "gcc"):
        if shutil.which(program) is None:
            raise NotInstalledError(f"{program} is not on PATH: apt-get install g++")
    python = venv(home, "llama")
    pip(python, "scikit-build-core", "cmake", "ninja", title="cmake and ninja", log=log)
    _unpack(python, folder, log)
    tools = python.parent
    settings = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    where = ["-S", llama_source(home), "-B", folder / "build"]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    command([tools / "cmake", *where, *generator, *settings], title="configuring llama.cpp", log=log)
    jobs = str(os.cpu_count() or 1)
    build = [tools / "cmake", "--build", folder / "build", "--target", "llama-server", "--parallel", jobs]
    command(build, title="building llama-server (about ten minutes)", log=home / "logs" / "build-llama.log")
    mark_done(folder, want)


def _unpack(python: Path, folder: Path, log: Path) -> None:
    if llama_source_is(folder, VERSION):
        return
    folder.mkdir(parents=True, exist_ok=True)
    package = ["--no-deps", "--no-binary", "llama-cpp-python", "--no-build-isolation", f"llama-cpp-python=={VERSION}"]
    download = [python, "-m", "pip", "--disable-pip-version-check", "download", "--dest", folder, *package]
    command(download, title=f"sources of llama-cpp-python {VERSION}", log=log)
    shutil.rmtree(folder / "source", ignore_errors=True)
    with tarfile.open(next(folder.glob(f"llama_cpp_python-{VERSION}.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    (folder / f"llama_cpp_python-{VERSION}").rename(folder / "source")


def llama_source_is(folder: Path, version: str) -> bool:
    about = folder / "source" / "PKG-INFO"
    return about.is_file() and f"Version: {version}\n" in about.read_text("utf-8", "replace")
