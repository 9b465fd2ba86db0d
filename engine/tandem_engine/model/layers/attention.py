"""Self-attention around the one operation that depends on other tokens.

    (norm) ─▶ qkv ─▶ (q, k norm) ─▶ rotate ─▶ attend ─▶ output ─▶ (norm) ─▶ added to the hidden states
                     └── on a device by the plan ──┘

Shapes use  T = tokens of the step, H = query heads, KV = key/value heads, D = head_dim.
"""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.attention.backend import TurningPlan
from tandem_engine.kernels.head_turn import HeadNorm
from tandem_engine.model.base import Attend
from tandem_engine.model.layers.linear import Projection
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.layers.rotary import Rotation


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttention:
    """Everything of attention that does not depend on the other tokens."""

    norm: Norm
    """Before the block; applied by the decoder, which adds to the hidden states on the way."""
    qkv: Projection
    qk_norm: Norm | None
    """Of weight [H + KV, D]: one operation for all heads of q and k."""
    output: Projection
    output_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def attend(self, layer: int, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Normalised hidden states [T, hidden] to what each token gathered, [T, H * D]; `project` is yet to come."""
        rotated, num_kv = self.num_heads + self.num_kv_heads, self.num_kv_heads
        heads = self.qkv(normed).view(normed.shape[0], rotated + num_kv, self.head_dim)
        if isinstance(attend, TurningPlan):
            q, k, v = heads.split_with_sizes((self.num_heads, num_kv, num_kv), dim=1)
            norm = None if self.qk_norm is None else HeadNorm(self.qk_norm.weight, self.qk_norm.eps)
            return attend.turn_and_attend(layer, q, k, v, rotation.turn(norm))
        qk, v = heads.split_with_sizes((rotated, num_kv), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotation.apply(qk).split_with_sizes((self.num_heads, num_kv), dim=1)
        return attend(layer, q, k, v)

    def project(self, gathered: Tensor) -> Tensor:
        """What `attend` returned to what is added to the hidden states."""
        out = self.output(gathered)
        return out if self.output_norm is None else self.output_norm(out)
