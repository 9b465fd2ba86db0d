"""How workers of one container share its memory, where it is too small for pools of the default size.

Workers that start at the same time all find the same memory free. So each gets a share of the container's limit, which
does not depend on the order of starts, and holds for a worker that is restarted next to others.
"""

from math import floor
from pathlib import Path

from tandem_engine.base.cgroups import memory_limit
from tandem_engine.config.cache import DEFAULT_KV_BYTES

WORKER_BYTES = 512 << 20
"""Of a worker on a CPU, without weights and pool: torch and kernels, what steps take, the worker service."""

SERVICES_BYTES = 192 << 20
"""Of the gateway, Redis and `tandem up`, with requests."""

SPARE = 0.05
"""Of what workers get: nothing is measured so well that none has to stay free."""


def share_of_worker(folder: Path, workers: int) -> float | None:
    """`mem_fraction_static` of each of `workers` with the checkpoint in `folder`; None where memory is no concern."""
    limit = memory_limit()
    if limit is None or limit >= workers * (DEFAULT_KV_BYTES + _weights(folder) + WORKER_BYTES) + SERVICES_BYTES:
        return None
    share = (limit - SERVICES_BYTES) / limit * (1 - SPARE) / workers
    return max(0.01, floor(share * 1e4) / 1e4)


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
