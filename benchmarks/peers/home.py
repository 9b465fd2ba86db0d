"""Where peers, models and logs lie: one folder outside the repository, TANDEM_PEERS_HOME or ~/.cache/tandem-peers."""

import os
from pathlib import Path


def default_home() -> Path:
    return Path(os.environ.get("TANDEM_PEERS_HOME") or Path.home() / ".cache" / "tandem-peers")


def venv_python(home: Path, peer: str) -> Path:
    return home / "venvs" / peer / "bin" / "python"


def llama_source(home: Path) -> Path:
    return home / "llama" / "source" / "vendor" / "llama.cpp"


def llama_server(home: Path) -> Path:
    return home / "llama" / "build" / "bin" / "llama-server"


def vllm_preloads(home: Path) -> list[Path]:
    """What vLLM wants preloaded on CPUs, as far as it is there: tcmalloc and the OpenMP it was built with."""
    places = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        *home.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"),
    ]
    openmp = venv_python(home, "vllm").parents[1] / "lib" / "libiomp5.so"
    return [*places[:1], *([openmp] if openmp.is_file() else [])]
