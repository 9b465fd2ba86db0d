"""Ranks as threads of the test, with real gloo between them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from tandem_engine.parallel.group import Parallel
from tandem_engine.parallel.torch_group import join_ranks

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Parallel], T], *, timeout_s: float = 120.0) -> list[T]:
    """What `work` returns on each of `size` ranks. The first rank's error is raised, after all have ended.

    `timeout_s`: for each collective, and for coming together. All threads run before the first one waits for others.
    """
    store, present = HashStore(), Barrier(size)

    def run(rank: int) -> T:
        present.wait()
        parallel = join_ranks(store, rank=rank, size=size, device=torch.device("cpu"), timeout_s=timeout_s)
        try:
            return work(parallel)
        finally:
            parallel.close()

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
        return list(threads.map(run, range(size)))
