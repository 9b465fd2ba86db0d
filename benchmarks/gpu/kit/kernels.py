"""Kernels for a GPU that is not there: Triton's cache of what the parts of a run launch, for the kit.

    python -m gpu.kit.kernels FOLDER [--only TEXT]     by the Python, torch and Triton of the GPU machine
    python -m gpu.kit.kernels --key                    of its Triton: with another key none of these kernels is found

Every source below goes through the code that launches, with tensors of the CPU or of no device, and a driver that says
sm_90 and runs nothing (`ahead_of_time.launches_that_only_compile`). So Triton makes each key as it does on the card:
from the text of the function and its callees and the line it begins at, types, alignment and values of arguments,
options, assembler, its own files, and variables that change code. No path, time, user or driver is part of it, and two
trees with the same files have the same keys. A kernel of another tree or Triton has another key: it is not found, and
the GPU machine compiles its own.

Of an engine the kernels are those of its start and warm-up, which are all that its requests launch
(`tests/differential/test_warm_engine.py`), with one layer of each kind: others launch the same. Weights are zeros that
take no memory, and each source is a process of its own, one after the other.
"""

import argparse
import hashlib
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import cache as triton_cache

from gpu.cases import CaseMaker, Sizes
from gpu.parts.engine import LOADS
from gpu.parts.kernels import KINDS, label
from gpu.parts.tiny_run import TWO_LAYERS
from gpu.shapes import LLAMA_3_1_8B, SHAPES
from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, LoadFormat, SchedulerConfig
from tandem_engine.config.device_defaults import with_device_defaults
from tandem_engine.disaggregation.digest import makers_on_device
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.executor.memory_profile import HostMeter
from tandem_engine.kernels.triton import common
from tandem_engine.library.llm import config_from_options
from tandem_engine.memory.pool import KvPool
from tandem_engine.model import decoder, loader
from tandem_engine.model.layers import linear, triton_experts
from tandem_testing.digest_pools import signed_words
from tandem_testing.plain_device import PlainDevice
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint
from tandem_testing.triton_kernels.ahead_of_time import launches_that_only_compile
from tandem_testing.triton_kernels.tensors import kernels_on

ARCH = 90
H200 = common.DeviceFacts(multiprocessors=132, shared_bytes=227 << 10)
"""Constants of kernels follow from these."""
MEMORY_BYTES = 140 << 30
"""Of which defaults of an engine follow."""
MAX_BYTES = 3 << 30
"""Of a process that compiles: one that took more has failed."""
LAYERS: dict[str, dict[str, int]] = {
    "V2-Lite": {"num_hidden_layers": 2},
    "Next": {"num_hidden_layers": 2, "full_attention_interval": 2},
}
"""One layer of each kind, where there are several."""
ENGINES: tuple[tuple[str, dict[str, object]], ...] = (
    ("8B", {}),
    ("8B", {"kv_cache_dtype": "fp8"}),
    ("30B-A3B", {}),
    ("0.6B", {}),
    ("V2-Lite", {}),
    ("Next", {}),
)
"""Shapes of the parts `engine-…` and `trace`, and flags that they are started with."""
SMALL_ENGINES = (("tiny checkpoint", "float32"), ("tiny run", "bfloat16"))
"""Of `probe` and of `sanitize`."""


def triton_key() -> str:
    """Of the Triton that runs: of its files and libraries."""
    return hashlib.sha256(triton_cache.triton_key().encode()).hexdigest()[:16]


def sources() -> dict[str, Callable[[], None]]:
    """By name, what launches kernels of a run."""
    found: dict[str, Callable[[], None]] = {}
    for shape, options in ENGINES:
        found[" ".join(["engine", shape, *map(str, options.values())])] = partial(launch_engine, shape, options)
    for kind, shape in KINDS:
        found[f"kernels {kind.__name__} {shape}"] = partial(launch_cases, kind, shape)
    found["digests 8B"] = launch_digests
    for name, dtype in SMALL_ENGINES:
        found[f"engine {name}"] = partial(launch_small_engine, name, dtype)
    return found


def launch_engine(name: str, options: dict[str, object]) -> None:
    """Start and warm up an engine of random weights as `gpu.engine` does, with the defaults of the card."""
    shape = SHAPES[name]
    shape = replace(shape, config=shape.config | LAYERS.get(name, {"num_hidden_layers": 1}))
    with tempfile.TemporaryDirectory() as folder:
        flags = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", **options}
        flags["context_length"] = LOADS[name].longest
        config = with_device_defaults(config_from_options(shape.write(Path(folder)), flags), MEMORY_BYTES)
        _warm_up(replace(config, device="cpu", cache=replace(config.cache, num_pages=300)))


def launch_small_engine(name: str, dtype: str) -> None:
    """Of the tiny checkpoint of `probe`, with pages of a CPU and of a GPU; or of the program of `sanitize`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        is_run = name == "tiny run"
        checkpoint = TWO_LAYERS.write(path) if is_run else write_tiny_checkpoint("qwen3", path)
        for page_size in (16, 64):
            _warm_up(
                EngineConfig(
                    model_path=str(checkpoint),
                    dtype=dtype,
                    load_format=LoadFormat.DUMMY if is_run else LoadFormat.AUTO,
                    cache=CacheConfig(num_pages=64, page_size=page_size),
                    scheduler=SchedulerConfig(context_length=256, max_running_requests=8, chunked_prefill_size=32),
                )
            )


def _warm_up(config: EngineConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # What a kernel would have written is read as an index: begin with zeros.
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        loaded = load(replace(config, disagg=DisaggConfig(transport="none")), progress=False)
        with Engine.build(loaded, loaded.config, platform=PlainDevice()) as engine:
            engine.warm_up()


def launch_cases(kind: type[CaseMaker], name: str) -> None:
    """Each case of the part `kernels` once, with tensors of no device. One that cannot do without numbers costs itself
    alone; `RuntimeError` names them."""
    maker = kind(shape=SHAPES[name], sizes=Sizes(), device=torch.device("meta"), dtype=torch.bfloat16)
    failed = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        # Work follows from how many experts were chosen; what is launched does not.
        patch.setattr(Tensor, "unique", Tensor.flatten)
        for make in maker.cases():
            try:
                make().run()
            except Exception as error:  # noqa: BLE001 - the boundary: the card compiles what this would have launched
                traceback.print_exception(error)
                failed.append(f"{label(make)}: {type(error).__name__}")
    if failed:
        raise RuntimeError(f"{len(failed)} cases failed: {', '.join(failed)}")


def launch_digests() -> None:
    """Of pages as an engine of the 8B has them, and of the other size that `handoff` moves."""
    shape = LLAMA_3_1_8B
    for page_size in (16, 64):
        pool = KvPool(
            num_pages=8, num_layers=shape.layers, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            page_size=page_size, dtype=torch.bfloat16, device="cpu",
        )  # fmt: skip
        makers_on_device(signed_words(pool), pool.layout)


@contextmanager
def no_device() -> Iterator[list[bool]]:
    """Within, kernels compute what lies on a CPU, for an H200 that is not there. Yields for each kernel that a launch
    asked for whether it was in Triton's cache."""
    hits: list[bool] = []

    def listener(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    with kernels_on("cpu"), launches_that_only_compile(ARCH), pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "INTERPRETER", H200)
        patch.setattr(HostMeter, "available", lambda _: MEMORY_BYTES)
        # Nothing of a CPU's engine: no numba, and no packed weights.
        patch.setattr(decoder, "_fused", lambda made, *_, **__: made)
        patch.setattr(linear, "MIN_PACKED_ELEMENTS", 1 << 62)
        patch.setattr(loader.DummyWeights, "stacked", _weights)
        patch.setattr(triton_experts._Stack, "put", _put)
        patch.setattr(triton.knobs.compilation, "listener", listener)
        yield hits


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """That take no memory until they are written to, as pages of a new mapping do."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def _weights(self: loader.DummyWeights, *names: str, split: Any = None) -> Tensor:
    """In place of `DummyWeights.stacked`."""
    shapes = [self._held(self.shapes[name], split) for name in names]
    return _zeros((sum(shape[0] for shape in shapes), *shapes[0][1:]), self.dtype)


def _put(self: triton_experts._Stack, expert: int, matrix: Tensor) -> bool:
    """In place of `_Stack.put`, which copies what is zero already."""
    if self.held is None:
        assert expert == 0, f"{expert} is not the first"
        self.held = _zeros((self.count, *matrix.shape), matrix.dtype)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m gpu.kit.kernels")
    made.add_argument("folder", nargs="?", type=Path, help="Triton's cache: what it lacks is compiled")
    made.add_argument("--only", default="", metavar="TEXT", help="sources whose names contain this")
    made.add_argument("--key", action="store_true", help="print the key of Triton alone")
    made.add_argument("--source", help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.key:
        print(triton_key())
        return 0
    if args.source:
        return _compile(args.source)
    if args.folder is None:
        made.error("FOLDER is needed")
    return compile_all(args.folder, only=args.only)


def _compile(source: str) -> int:
    """In a process of its own: one line of JSON. A source that fails has compiled what it launched before."""
    with no_device() as hits:
        why = ""
        try:
            sources()[source]()
        except Exception as error:  # noqa: BLE001 - the boundary: what is missing is compiled on the card
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps({"found": hits.count(True), "compiled": hits.count(False), "bytes": _peak_bytes(), "why": why}))
    return 0


def _peak_bytes() -> int:
    """Of the memory of this process; rusage would have that of its parent."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name == "VmHWM":
            return int(rest.split()[0]) << 10
    return 0


def compile_all(folder: Path, *, only: str = "") -> int:
    """Every source, one at a time, with a line when it ends; 1 if any failed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = [name for name in sources() if only in name]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder.resolve()), "TRITON_INTERPRET": "0"}
    began, results = time.monotonic(), []
    for number, name in enumerate(names, 1):
        result = _run(name, environment)
        results.append(result)
        why = f"; FAILED: {result['why']}" if result["why"] else ""
        print(
            f"[{number}/{len(names)}, {time.monotonic() - began:.0f} s] {name}: {result['compiled']} compiled, "
            f"{result['found']} there already, {result['bytes'] / 2**30:.1f} GiB{why}",
            flush=True,
        )
    compiled = sum(result["compiled"] for result in results)
    print(f"{compiled} kernels compiled in {time.monotonic() - began:.0f} s; key of Triton {triton_key()}", flush=True)
    return 1 if any(result["why"] for result in results) else 0


def _run(name: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "gpu.kit.kernels", "--source", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        result = {"found": 0, "compiled": 0, "bytes": 0, "why": f"ended with status {done.returncode}"}
    if not result["why"] and result["bytes"] > MAX_BYTES:
        result["why"] = f"it took {result['bytes'] / 2**30:.1f} GiB of memory, more than {MAX_BYTES >> 30}"
    elif result["why"]:
        sys.stderr.write(done.stderr[-3000:])
    return result


if __name__ == "__main__":
    sys.exit(main())
