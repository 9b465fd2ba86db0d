"""What a command can lack on a machine, and the error message for it: an extra of the distribution, or disk space.

A command imports what it needs when it runs, so an installation without an extra fails at that import.
"""

import errno

from tandem_engine.base.release import install_hint

EXTRAS: dict[str, tuple[str, ...]] = {
    "engine": ("torch", "numpy", "numba", "llvmlite", "safetensors", "nixl", "llguidance", "xxhash", "tqdm"),
    "operator": ("kopf", "kubernetes", "aiohttp", "pythonjsonlogger", "websocket"),
    "router": ("grpc", "grpc_health", "grpc_reflection", "google", "envoy"),
    "lab": ("transformers",),
    "otel": ("opentelemetry",),
}
"""Extra → top-level modules of its distributions, and of what those need (websocket: of kubernetes)."""


def lacking(error: ModuleNotFoundError | OSError) -> str | None:
    """A sentence for the user of a command; None for an error that needs its traceback."""
    return missing_extra(error) if isinstance(error, ModuleNotFoundError) else full_disk(error)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """A sentence with the command that installs the module; None for a module of no extra, which is a bug of ours."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    return f"{module} is not installed: {install_hint(extra)}"


def full_disk(error: OSError) -> str | None:
    """A sentence for a file that could not be written because its disk or quota is full; None for any other error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    place = "" if error.filename is None else f" for {error.filename}"
    return f"no space left on the disk{place}: free some, or use a folder on another disk"
