"""Modules that are installed with an extra of the distribution, and the sentence that names it.

A command imports what it needs when it runs, so an installation without an extra fails at that import.
"""

import errno

EXTRAS: dict[str, tuple[str, ...]] = {
    "engine": ("torch", "numpy", "numba", "llvmlite", "safetensors", "nixl", "llguidance", "xxhash", "tqdm"),
    "operator": ("kopf", "kubernetes", "aiohttp", "pythonjsonlogger", "yaml", "websocket"),
    "router": ("grpc", "grpc_health", "grpc_reflection", "google", "envoy"),
    "reference": ("transformers",),
    "otel": ("opentelemetry",),
}
"""Extra → top-level modules of its distributions, and of what those need (websocket: of kubernetes)."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """A sentence with the command that installs the module; None for a module of no extra, which is a bug of ours."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    return f"{module} is not installed: pip install 'tandem[{extra}]'"


def full_disk(error: OSError) -> str | None:
    """A sentence for a file that could not be written because its disk or quota is full; None for any other error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    place = "" if error.filename is None else f" for {error.filename}"
    return f"no space left on the disk{place}: free some, or use a folder on another disk"
