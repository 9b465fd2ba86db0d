"""What a worker's memory is beside its weights and its KV pool.

    python benchmarks/worker_memory.py MODEL [MODEL ...] [--dtypes float32,bfloat16] [--kv-mib 512]

MODEL: folders of checkpoints (tools/random_model.py makes some). Each is served by `tandem up` with one worker for both
phases; requests fill its whole KV pool. Resident memory of the engine process and of the worker service is read once
the system is ready, with the pool full, and some seconds later, at rest. A process that has imported torch, and nothing
else, is taken off:

    share     (engine at rest − torch) / (weights + KV pool); 1.15 is the target
    beside    engine at rest − torch − weights − KV pool
    worked    as `beside`, at once: what steps have taken and freed is still there
    peak      (highest of the engine until it is ready − torch) / weights: what loading takes

`_own` is the same without pages of files, libraries above all: all workers of a machine share these, and the kernel may
drop them. Prints a JSON object per model and dtype; sizes are MiB. The first start compiles kernels and is not counted.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tandem_engine.base.freed_memory import REST_S
from tandem_engine.config import ModelConfig
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.tensor_names import expected_shapes
from tandem_services.common.sockets import free_port

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "tandem_services.cli.main"]
ENGINE = "tandem_engine.cli serve"
BARE_TORCH = "import torch, sys; print('ready', flush=True); sys.stdin.read()"
MIB = 1 << 20
MIN_PAGES = 320
"""A pool that takes a request of the default context length."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
PAGE_SIZE = 16
PROMPT, OUTPUT, STREAMS = 1000, 8, 4
"""Tokens of a request, and requests at a time."""
MIN_VOCAB = 1000
"""Of a vocabulary and its tokenizer."""
ANSWER_S = 600.0
SETTLE_S = 3.0
"""Beyond the rest that an engine gives memory back after."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    command: str


@dataclass(frozen=True, slots=True)
class Resident:
    """MiB of one process."""

    now: float
    own: float
    """Of `now`, memory that belongs to no file."""
    peak: float

    @classmethod
    def of(cls, pid: int) -> "Resident":
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
        return cls(*(int(fields[name]) / 1024 for name in ("VmRSS", "RssAnon", "VmHWM")))


def bare_torch() -> Resident:
    with subprocess.Popen(
        [sys.executable, "-c", BARE_TORCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None, "opened with a pipe"
        assert process.stdout.readline(), "torch cannot be imported"
        resident = Resident.of(process.pid)
        process.communicate()
    return resident


def weight_mib(config: ModelConfig, dtype: str) -> float:
    """Of every tensor once; a tied table is one."""
    return sum(prod(shape) for shape in expected_shapes(config).values()) * ITEM_BYTES[dtype] / MIB


def page_mib(config: ModelConfig, dtype: str) -> float:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * PAGE_SIZE * ITEM_BYTES[dtype] / MIB


class Worker:
    """A system of one worker, and its two processes."""

    def __init__(self, root: int, url: str) -> None:
        self._url = url
        family = list(_family(root))
        [self.engine] = [each.pid for each in family if ENGINE in each.command]
        [self.service] = [each.parent for each in family if each.pid == self.engine]

    def fill(self, tokens: int) -> None:
        """Compute distinct prompts of so many tokens in all."""
        random_ids = random.Random(0)
        prompts = [random_ids.choices(range(MIN_VOCAB), k=PROMPT) for _ in range(tokens // PROMPT + 1)]
        with ThreadPoolExecutor(max_workers=STREAMS) as clients:
            for answer in clients.map(self._complete, prompts):
                assert answer["usage"]["completion_tokens"] == OUTPUT, answer

    def _complete(self, prompt: list[int]) -> Any:
        body = {"model": "measured", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True}
        request = Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)


def _family(root: int) -> Iterator[Process]:
    """Everything that `root` and its children have started."""
    every = [_process(int(folder.name)) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    known = [each for each in every if each is not None]
    wanted = [root]
    while wanted:
        parent = wanted.pop()
        for each in known:
            if each.parent == parent:
                wanted.append(each.pid)
                yield each


def _process(pid: int) -> Process | None:
    """None for one that has ended since it was listed."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid=pid, parent=int(status.rsplit(")", 1)[1].split()[1]), command=command)


@contextmanager
def served(model: Path, dtype: str, pages: int, threads: int) -> Iterator[Worker]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("engine", "services"))}
    with tempfile.TemporaryDirectory(prefix="tandem-memory-") as folder, Path(folder, "err").open("w+") as err:
        port = free_port()
        argv = [*COMMAND, "up", "--model", str(model), "--served-model-name", "measured", "--port", str(port)]
        argv += ["--prefill", "0", "--decode", "0", "--both", "1", "--dtype", dtype, "--threads", str(threads)]
        argv += ["--num-pages", str(pages), "--page-size", str(PAGE_SIZE), "--run-dir", f"{folder}/run"]
        with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=err, text=True) as process:
            try:
                assert process.stdout is not None, "opened with a pipe"
                if not any("Tandem serves" in line for line in process.stdout):
                    err.seek(0)
                    raise SystemExit(f"tandem up ended:\n{err.read()}")
                yield Worker(process.pid, f"http://127.0.0.1:{port}")
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=ANSWER_S)


def measure(model: Path, dtype: str, kv_mib: float, threads: int) -> dict[str, object]:
    config = read_model_config(model)
    pages = int(kv_mib / page_mib(config, dtype))
    weights, pool, torch = weight_mib(config, dtype), pages * page_mib(config, dtype), bare_torch()
    with served(model, dtype, pages, threads) as worker:
        ready = Resident.of(worker.engine)
        worker.fill((pages + 1) * PAGE_SIZE)
        worked = Resident.of(worker.engine)
        time.sleep(REST_S + SETTLE_S)
        full, service = Resident.of(worker.engine), Resident.of(worker.service)
    figures = {
        "weights": weights,
        "kv_pool": pool,
        "torch": torch.now,
        "ready": ready.now,
        "worked": worked.now - torch.now - weights - pool,
        "full": full.now,
        "service": service.now,
        "beside": full.now - torch.now - weights - pool,
        "beside_own": full.own - torch.own - weights - pool,
        "peak_at_load": ready.peak,
    }
    shares = {
        "share": (full.now - torch.now) / (weights + pool),
        "share_own": (full.own - torch.own) / (weights + pool),
        "share_with_service": (full.now - torch.now + service.now) / (weights + pool),
        "peak": (ready.peak - torch.now) / weights,
    }
    return {name: round(value, 1) for name, value in figures.items()} | {
        name: round(value, 3) for name, value in shares.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--kv-mib", type=float, default=512, help="KV pool; the default is that of a worker")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for model in args.models:
        for dtype in args.dtypes.split(","):
            with served(model, dtype, MIN_PAGES, args.threads):
                pass  # kernels are compiled now
            figures = measure(model, dtype, args.kv_mib, args.threads)
            print(json.dumps({"model": model.name, "dtype": dtype, "threads": args.threads, **figures}), flush=True)


if __name__ == "__main__":
    main()
