"""What a layer computes beside attention and plain products."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gpu.cases import PAGE, Case, CaseMaker
from tandem_engine.kernels.fused_moe import fused_experts
from tandem_engine.kernels.gated_activation import gated_activation
from tandem_engine.kernels.head_turn import HeadTurn
from tandem_engine.kernels.rms_norm import add_rms_norm
from tandem_engine.kernels.rope_store import rotate_and_store
from tandem_engine.kernels.store_kv import store_kv


class LayerCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        yield self._rope_store
        yield self._store
        yield self._norm
        yield self._activation
        yield self._experts

    def _kv(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """K, V, their pages and slots, of a step."""
        tokens, shape = self.sizes.tokens, self.shape
        pool = self.pool(-(-tokens // PAGE))
        k, v = (self.randn(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        keys, values = pool.key_value(0)
        return k, v, keys, values, torch.randperm(tokens, device=self.device) + PAGE

    def _rope_store(self) -> Case:
        k, v, keys, values, slots = self._kv()
        tokens, shape = self.sizes.tokens, self.shape
        q = self.randn(tokens, shape.heads, shape.head_dim)
        cos, sin = (self.randn(tokens, shape.head_dim) for _ in range(2))
        work = 2 * tokens * shape.head_dim * (shape.heads + 2 * shape.kv_heads + 1) * self.dtype.itemsize
        return Case(
            name=f"RoPE and KV write, {tokens} tokens",
            run=lambda: rotate_and_store(q, k, v, HeadTurn(cos, sin, None), keys, values, slots),
            ceiling="copy",
            work=work,
            target=0.85,
            peers=self.copy_of(work),
        )

    def _store(self) -> Case:
        k, v, keys, values, slots = self._kv()

        def index_put() -> None:
            pages, places = slots // PAGE, slots % PAGE
            keys[pages, :, places] = k
            values[pages, :, places] = v

        return Case(
            name=f"KV write, {self.sizes.tokens} tokens",
            run=lambda: store_kv(k, v, keys, values, slots),
            ceiling="copy",
            work=2 * (k.nbytes + v.nbytes),
            target=0.85,
            peers={"torch index_put": index_put, **self.copy_of(2 * (k.nbytes + v.nbytes))},
        )

    def _norm(self) -> Case:
        tokens, hidden = self.sizes.tokens, self.shape.hidden
        stream, delta, weight = self.randn(tokens, hidden), self.randn(tokens, hidden), self.randn(hidden)

        def torch_norm() -> Tensor:
            stream.add_(delta)
            return torch.nn.functional.rms_norm(stream, (hidden,), weight, 1e-6)

        return Case(
            name=f"RMSNorm with residual, {tokens} tokens",
            run=lambda: add_rms_norm(stream, delta, weight, eps=1e-6),
            ceiling="copy",
            work=4 * stream.nbytes,
            target=0.85,
            peers={"torch rms_norm": torch_norm, **self.copy_of(4 * stream.nbytes)},
        )

    def _activation(self) -> Case:
        gate_up = self.randn(self.sizes.tokens, 2 * self.shape.inner)
        inner = self.shape.inner
        return Case(
            name=f"SwiGLU, {self.sizes.tokens} tokens",
            run=lambda: gated_activation(gate_up, "silu"),
            ceiling="copy",
            work=1.5 * gate_up.nbytes,
            target=0.85,
            peers={
                "torch": lambda: torch.nn.functional.silu(gate_up[:, :inner]) * gate_up[:, inner:],
                **self.copy_of(1.5 * gate_up.nbytes),
            },
        )

    def _experts(self) -> Case:
        sizes, hidden = self.sizes, self.shape.hidden
        chosen = 2
        x = self.randn(sizes.tokens, hidden)
        experts = torch.rand((sizes.tokens, sizes.experts), device=self.device).topk(chosen, dim=1).indices.int()
        weights = self.randn(sizes.tokens, chosen)
        gate_up = self.randn(sizes.experts, 2 * sizes.expert_inner, hidden)
        down = self.randn(sizes.experts, hidden, sizes.expert_inner)
        return Case(
            name=f"fused MoE, {sizes.tokens} tokens, {chosen} of {sizes.experts} experts",
            run=lambda: fused_experts(x, experts, weights, gate_up, down, activation="silu"),
            ceiling="matmul",
            work=6 * sizes.tokens * chosen * hidden * sizes.expert_inner,
        )
