"""Attention of a CPU over a pool of float8: its kernels read the stored numbers, and the scales go around them.

    q·(k·s_k)ᵀ = (q·s_k)·kᵀ          softmax(…)·(v·s_v) = (softmax(…)·v)·s_v          for each K/V head

in float32 on both sides, so what a token gathers depends on its own sequence alone, as without scales.
"""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.attention.backend import AttentionPlan
from tandem_engine.memory.pool import KvPool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledPlan:
    """Implements `AttentionPlan` by one that knows nothing of scales."""

    plan: AttentionPlan
    """Answers in the dtype of its queries, float32."""
    pool: KvPool

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionPlan.__call__`."""
        scales = self.pool.scales_of(layer)
        assert scales is not None, f"a pool of {self.pool.data.dtype} has no scales"
        gathered = self.plan(layer, _by_kv_head(q.float(), scales.k), k, v).view(q.shape)
        return _by_kv_head(gathered, scales.v).to(q.dtype).flatten(1)


def _by_kv_head(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, heads, D], each head times the factor [KV] of the K/V head that it reads."""
    tokens, _, size = x.shape
    return (x.reshape(tokens, len(factors), -1, size) * factors[:, None, None]).flatten(1, 2)
