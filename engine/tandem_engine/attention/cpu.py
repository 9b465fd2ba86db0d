"""The CPU backend: compiled kernels for decodes, torch for prompts.

    tokens of a step            how                                       why
    DECODE                      paged kernel: pages read in place         bound by memory: nothing is copied
    a few on a cached prefix    paged kernel: one query per token         reads less than a gather would copy
    any other EXTEND            torch's fused attention, one sequence     bound by arithmetic, where its matmuls
                                at a time, over gathered pages            win; the gather is small beside them

Which way a sequence goes depends on that sequence alone, and so does its result.
"""

from dataclasses import dataclass, field

from torch import Tensor

from tandem_engine.attention.cpu_kernels import Array
from tandem_engine.attention.cpu_paged import PagedKernels, PagedQueries, Query, plan_paged
from tandem_engine.attention.cpu_prompt import Prompt, attend_prompt, plan_prompt
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.memory.pool import KvPool

SHORT_EXTEND = 16
"""Longest run of tokens on a cached prefix that the paged kernel takes (ADR 0002)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan:
    """Implements `AttentionPlan`."""

    pool: KvPool
    kernels: PagedKernels
    slots: Array
    paged: PagedQueries | None
    prompts: tuple[Prompt, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kernels.store(layer, k, v, self.slots)
        if self.paged is not None and not self.prompts:
            return self.kernels.attend(layer, q, self.paged).to(q.dtype).flatten(1)
        out = q.new_empty(q.shape)
        if self.paged is not None:
            tokens = self.paged.tokens
            out[tokens] = self.kernels.attend(layer, q, self.paged)[tokens].to(q.dtype)
        for prompt in self.prompts:
            part = slice(prompt.start, prompt.stop)
            out[part] = attend_prompt(self.pool, layer, q[part], k[part], v[part], prompt)
        return out.flatten(1)


class CpuAttention:
    """Implements `AttentionBackend` over a float32 or bfloat16 pool in host memory.

    Raises:
        ConfigError: for a pool of another dtype.
    """

    def __init__(self, pool: KvPool, *, num_heads: int) -> None:
        self._pool = pool
        self._kernels = PagedKernels(pool, num_heads=num_heads)

    def plan(self, batch: ForwardBatch) -> CpuPlan:
        """Three small arrays for the paged kernel, and a mask for each prompt with a cached prefix."""
        extends = _sort_extends(batch, self._pool) if batch.num_extend else Extends()
        paged = None
        if extends.short or not extends.prompts or batch.num_extend < batch.num_sequences:
            paged = plan_paged(batch, short=extends.short, first_decode=extends.num_tokens)
        return CpuPlan(
            pool=self._pool,
            kernels=self._kernels,
            slots=batch.out_cache_loc.numpy(),
            paged=paged,
            prompts=tuple(extends.prompts),
        )

    def warm_up(self) -> None:
        """Compile the kernels: several seconds the first time on a machine, else read from numba's cache."""
        self._kernels.warm_up()


@dataclass(kw_only=True, slots=True)
class Extends:
    """EXTEND sequences of a step by the way they go."""

    short: list[Query] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    num_tokens: int = 0


def _sort_extends(batch: ForwardBatch, pool: KvPool) -> Extends:
    extends = Extends()
    extend_lens = batch.extend_lens[: batch.num_extend].tolist()
    for row, (extend_len, seq_len) in enumerate(zip(extend_lens, batch.seq_lens.tolist(), strict=False)):
        start, prefix_len = extends.num_tokens, seq_len - extend_len
        if prefix_len > 0 and extend_len <= SHORT_EXTEND:
            extends.short += [Query(start + i, row, prefix_len + i + 1) for i in range(extend_len)]
        else:
            extends.prompts.append(plan_prompt(start, extend_len, seq_len, batch.page_table[row], pool))
        extends.num_tokens += extend_len
    return extends
