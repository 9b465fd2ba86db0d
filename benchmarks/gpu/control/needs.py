"""What a part cannot do without: a part that lacks it is skipped, with the reason."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

Need = Callable[[], str | None]
"""Why a part cannot run; None if it can."""
CUDA_TOOLS = Path("/usr/local/cuda/bin")


def modules(*names: str) -> Need:
    """Packages that can be imported."""

    def lacking() -> str | None:
        absent = [name for name in names if find_spec(name) is None]
        return f"no {', '.join(absent)} here (tools/gpu_pack.sh packs what an engine needs)" if absent else None

    return lacking


def tool(name: str) -> Need:
    """A program on the PATH or in CUDA's folder."""
    return lambda: None if find_tool(name) else f"no {name} here"


def find_tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(CUDA_TOOLS))


def memory(gib: float) -> Need:
    """So much memory of the device, in all."""

    def lacking() -> str | None:
        import torch

        if not torch.cuda.is_available():
            return None
        has = torch.cuda.mem_get_info()[1] / 2**30
        return None if has >= gib else f"{gib:.0f} GiB of GPU memory needed, this one has {has:.0f}"

    return lacking
