"""Runs of tokens on a CPU: which blocks of queries a step has, and the threads that compute them.

Planned once per step and spec, for all runs of the step together; a layer then is one call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention.cpu_blocks import SEQUENCE_COLUMNS, TASK_COLUMNS, WORK, build_block_kernel
from tandem_engine.attention.cpu_queries import NO_WINDOW
from tandem_engine.attention.pieces import Array
from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.attention.team import team
from tandem_engine.attention.vectors import PANEL

WIDEST_TASK = 4
"""Panels of queries that share a copy of the keys. With more of them panels would push each other out of the caches."""
TASKS_PER_THREAD = 4
"""So many at least, if need be of fewer panels, for the threads to end together."""
PARALLEL_SCORES = 1 << 14
"""Scores of a layer from which other threads, some 5 µs away, pay."""
_LOG2_E = math.log2(math.e)


class Run(NamedTuple):
    """`length` tokens of a step from `start` on: the last ones of the sequence in `row` of the page table."""

    start: int
    row: int
    position: int
    """Of the first token."""
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    """The runs of a step, planned for one spec."""

    work: Array
    """[1] `WORK`; q, out and layer are set for each layer."""
    owned: tuple[Array, ...]
    """Arrays that `work` has the addresses of."""
    scores: int
    """How many the queries of all heads compute, at most."""


class BlockAttention:
    """The kernel for blocks of queries, bound to a pool's pages in host memory."""

    def __init__(self, pages: Array, *, num_heads: int) -> None:
        """`pages` [page, layer, 2, KV, slot, D] as `cpu_numbers` has them."""
        _, num_layers, _, kv_heads, page_size, head_dim = pages.shape
        self._pages = pages
        self._num_heads, self._kv_heads = num_heads, kv_heads
        self._constant = np.zeros(1, WORK)
        self._constant["pages"] = pages.ctypes.data
        self._constant["num_layers"], self._constant["page_size"] = num_layers, page_size
        self._constant["num_kv_heads"], self._constant["head_dim"] = kv_heads, head_dim
        self._constant["group"] = num_heads // kv_heads

    def warm_up(self) -> None:
        """Compile."""
        build_block_kernel(self._pages.dtype)

    def plan(self, runs: Sequence[Run], page_table: Tensor, spec: AttentionSpec) -> Extend:
        """`page_table` [B, P] int32 is kept, as are no other tensors."""
        table = page_table.numpy()
        group = self._num_heads // self._kv_heads
        panels = self._panels(runs, group)
        width = width_of_tasks(panels, group)
        sequences = np.array([run[:SEQUENCE_COLUMNS] for run in runs], np.int64)
        tasks = np.array(
            [
                (index, head, begin, min(begin + width, run.length))
                for index, run in enumerate(runs)
                for begin in reversed(range(0, run.length, width))
                for head in range(self._kv_heads)
            ],
            np.int64,
        ).reshape(-1, TASK_COLUMNS)
        work = self._constant.copy()
        work["num_tasks"], work["tasks"] = len(tasks), tasks.ctypes.data
        work["sequences"] = sequences.ctypes.data
        work["page_table"], work["table_width"] = table.ctypes.data, table.shape[1]
        work["window"] = NO_WINDOW if spec.window is None else spec.window
        work["panels"] = -(-width * group // PANEL)
        work["soft_cap"] = spec.soft_cap or 0.0
        work["scale"] = spec.scale * _LOG2_E if spec.soft_cap is None else spec.scale / spec.soft_cap
        scores = sum(run.length * min(run.position + run.length, int(work["window"][0])) for run in runs)
        return Extend(work=work, owned=(tasks, sequences, table), scores=scores * self._num_heads)

    def attend(self, layer: int, q: Tensor, extend: Extend, out: Tensor) -> None:
        """q [T, heads, D] to the rows of `out`, of that shape, that belong to the runs. Both are dense float32."""
        kernel = build_block_kernel(self._pages.dtype)
        work = extend.work
        work["next_task"], work["layer"] = 0, layer
        work["q"], work["out"] = q.data_ptr(), out.data_ptr()
        threads = torch.get_num_threads() if extend.scores >= PARALLEL_SCORES else 1
        team().run(kernel.address, work.ctypes.data, threads)

    def _panels(self, runs: Sequence[Run], group: int) -> int:
        """Of a task: as many as leave enough tasks for all threads. No result depends on it."""
        wanted = TASKS_PER_THREAD * torch.get_num_threads()
        panels = WIDEST_TASK
        while panels > 1 and wanted > self._kv_heads * sum(-(-run.length * group // (panels * PANEL)) for run in runs):
            panels //= 2
        return panels


def width_of_tasks(panels: int, group: int) -> int:
    """Tokens of a task: as many as fit its panels, and where it can be so many that they fill them."""
    width = max(panels * PANEL // group, 1)
    filling = PANEL // math.gcd(PANEL, group)
    return width if width < filling else width // filling * filling
