"""What a layer computes besides attention and plain products."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gpu.cases import PAGE, Case, CaseMaker
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.kernels.triton.norm_activation import add_rms_norm, gated_activation
from tandem_engine.kernels.triton.rope_store import rotate_and_store
from tandem_engine.kernels.triton.store_kv import store_kv


class LayerCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        yield self._rope_store
        yield self._store
        yield self._norm
        yield self._activation

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
