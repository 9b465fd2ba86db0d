"""What the machine can do at most, measured in the same run: memory bandwidth and matrix products.

`python -m peers.limits THREADS` prints one JSON object. Bandwidth is the best of reading and of copying 256 MiB,
products the best of two sizes, by torch's own product and by oneDNN's with a packed side; each a median.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peers.engines.base import python_path
from peers.processes import output_of
from peers.shapes import BYTES

if TYPE_CHECKING:
    from torch import Tensor


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """With all threads."""

    memory_gb_s: float
    gflops: dict[str, float]
    """By dtype."""


def measure(threads: int, *, log: Path, limit_s: float) -> Limits:
    """In a process of its own: torch keeps its threads. Raises `PeerError`."""
    argv = [sys.executable, "-m", "peers.limits", str(threads)]
    output = output_of(argv, log=log, limit_s=limit_s, environment=python_path())
    return msgspec.json.decode(output, type=Limits)


def better(one: Limits, other: Limits) -> Limits:
    """A limit is the most that was seen."""
    gflops = {dtype: max(rate, other.gflops[dtype]) for dtype, rate in one.gflops.items()}
    return Limits(memory_gb_s=max(one.memory_gb_s, other.memory_gb_s), gflops=gflops)


def _median_seconds(work: Callable[[], Any], times: int) -> float:
    work()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _products(x: "Tensor", y: "Tensor") -> Iterator[Callable[[], Any]]:
    """In float32 either may be twice as fast as the other, by the machine."""
    import torch

    yield lambda: x @ y
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed = torch.ops.mkldnn._reorder_linear_weight(y, len(x))
        yield lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    numbers = 64 << 20
    a, b = torch.rand(numbers), torch.rand(numbers)
    read = 4 * numbers / _median_seconds(b.sum, 7)
    copy = 8 * numbers / _median_seconds(lambda: a.copy_(b), 7)
    gflops = {}
    for dtype in BYTES:
        rates = []
        for size in (1024, 2048):
            x, y = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
            seconds = min(_median_seconds(product, 9) for product in _products(x, y))
            rates.append(2 * size**3 / seconds / 1e9)
        gflops[dtype] = max(rates)
    print(json.dumps({"memory_gb_s": max(read, copy) / 1e9, "gflops": gflops}))


if __name__ == "__main__":
    main()
