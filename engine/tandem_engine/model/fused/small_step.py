"""A step of few tokens: one call of the step kernel."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention.cpu import CpuPlan
from tandem_engine.attention.cpu_kernels import STATISTICS
from tandem_engine.attention.cpu_paged import PagedQueries
from tandem_engine.attention.phases import PHASE_BYTES
from tandem_engine.attention.pieces import Array
from tandem_engine.attention.team import team
from tandem_engine.model.fused.arrays import ModelArrays
from tandem_engine.model.fused.kernel import StepKernel
from tandem_engine.model.fused.step import PHASES_OF_LAYER

PARALLEL_BYTES = 16 << 20
"""Weights of a step from which other threads pay: less takes no longer than the threads wait for one another."""
TASKS_PER_THREAD = 2
"""Of attention, so many at least where its heads can be told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallStep:
    """A step for the kernel."""

    kernel: StepKernel
    model: ModelArrays
    plan: CpuPlan
    queries: PagedQueries
    scale: float
    """Of attention scores."""

    def forward(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        model, pages, queries = self.model, self.plan.kernels.pages, self.queries
        tokens, threads = len(input_ids), self._threads()
        given = {
            name: each if each.is_contiguous() else each.contiguous()
            for name, each in (("input_ids", input_ids), ("positions", positions), ("wanted", wanted))
        }
        out = torch.empty((len(wanted), model.config.hidden_size), dtype=model.dtype)
        arrays = self._scratch(tokens) | {"slots": self.plan.slots, "pages": pages}
        arrays |= {"page_table": queries.page_table, "tasks": queries.tasks, "queries": queries.queries}
        arrays |= {"groups": queries.groups, "members": queries.members}
        record = model.constant.copy()
        step = record[0]
        for name, array in arrays.items():
            step[name] = array.ctypes.data
        for name, tensor in given.items():
            step[name] = tensor.data_ptr()
        step["out"], step["tokens"], step["wanted_tokens"] = out.data_ptr(), tokens, len(wanted)
        step["page_size"], step["table_width"] = pages.shape[4], queries.page_table.shape[1]
        step["num_tasks"], step["num_groups"] = len(queries.tasks), len(queries.groups)
        step["num_queries"] = len(queries.queries)
        step["head_parts"] = self._head_parts(threads)
        step["scale"] = self.scale
        team().run(self.kernel.address, record.ctypes.data, threads)
        if step["refused"]:
            raise IndexError("a token id lies outside of the vocabulary, or a position beyond the rotary table")
        return out

    def _threads(self) -> int:
        return torch.get_num_threads() if self.model.weight_bytes >= PARALLEL_BYTES else 1

    def _head_parts(self, threads: int) -> int:
        """See `STEP`. All heads of a page together come from memory faster, where there are tasks enough."""
        few = threads > 1 and len(self.queries.groups) < TASKS_PER_THREAD * threads
        return self.model.config.num_kv_heads if few else 1

    def _scratch(self, tokens: int) -> dict[str, Array]:
        """See `STEP`, by its names."""
        config = self.model.config
        heads, head_dim = config.num_heads, config.head_dim
        return {
            "phases": np.zeros((2 + PHASES_OF_LAYER * config.num_layers, PHASE_BYTES), np.uint8),
            "hidden": np.empty((tokens, config.hidden_size), np.float32),
            "qkv": np.empty((tokens, heads + 2 * config.num_kv_heads, head_dim), np.float32),
            "query": np.empty((tokens, heads, head_dim), np.float32),
            "partial": np.empty((len(self.queries.tasks), heads, head_dim + STATISTICS), np.float32),
            "gate_up": np.empty((tokens, 2 * config.intermediate_size), np.float32),
        }
