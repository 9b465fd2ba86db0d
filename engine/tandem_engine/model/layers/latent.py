"""Attention over one latent per token (MLA), in its absorbed form.

    keys and values of a head      k = [W_k c | r],  v = W_v c          c the token's latent, r its rotated part
    scores                         q · k = (W_kᵀ q_plain) · c + q_rotated · r
    what a token gathers           Σ w v = W_v Σ w c

So no key and no value is ever computed: attention is that of one K/V head whose key is [c | r] and whose value is c.
Both products with W_k and W_v are one small matrix per head, before and behind it. `c` is stored normalized, and `r`
with dimensions that rotate together half of it apart, whichever way the checkpoint has them: queries and keys agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.config import LatentConfig
from tandem_engine.model.attention.backend import Attend
from tandem_engine.model.layers.attention import Rotation
from tandem_engine.model.layers.linear import Delta, Projection
from tandem_engine.model.layers.norm import Norm


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Stands where `SelfAttention` stands. Shapes use  T = tokens of the step, H = query heads of this rank."""

    norm: Norm
    """Before the block; applied by the decoder, which adds to the hidden states on the way."""
    shape: LatentConfig
    compress: Projection
    """[T, hidden] to [T, query_rank + rank + rotated_size], or without the first of them."""
    query_norm: Norm | None
    """Of the numbers that queries are computed from; None where those are the hidden states."""
    query: Projection
    """To [T, H * query_size]."""
    latent_norm: Norm
    keys: Tensor
    """[H, plain_size, rank]: W_k"""
    values: Tensor
    """[H, rank, value_size]: W_vᵀ"""
    output: Projection

    @property
    def sinks(self) -> None:
        """See `SelfAttention`: there are none."""
        return

    @property
    def num_heads(self) -> int:
        """Of this rank."""
        return len(self.keys)

    def attend(
        self, layer: int, normed: Tensor, rotation: Rotation, attend: Attend, delta: Delta | None = None
    ) -> Tensor:
        """Normalized hidden states [T, hidden] to what each token gathered, [T, H * rank]; `project` is yet to come."""
        assert delta is None, "open_adapter refuses adapters of models with latents"
        shape, heads = self.shape, self.num_heads
        query, latent, shared = self._parts(normed)
        plain, turning = query.split_with_sizes((shape.plain_size, shape.rotated_size), dim=-1)
        turned = rotation.apply(self._halves(torch.cat((turning, shared[:, None]), dim=1)))
        absorbed = torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1)
        q = torch.cat((absorbed, turned[:, :heads]), dim=-1)
        rows = torch.cat((self.latent_norm(latent)[:, None], turned[:, heads:]), dim=-1)
        return attend(layer, q, rows, rows[..., : shape.rank])

    def project(self, gathered: Tensor, delta: Delta | None = None) -> Tensor:
        """What `attend` returned to what is added to the hidden states."""
        assert delta is None, "open_adapter refuses adapters of models with latents"
        latents = gathered.view(len(gathered), self.num_heads, self.shape.rank).transpose(0, 1)
        return self.output(torch.bmm(latents, self.values).transpose(0, 1).flatten(1))

    def _parts(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, query_size], latents [T, rank] before their norm, and the key part [T, rotated_size]."""
        shape = self.shape
        sizes = (shape.query_rank or 0, shape.rank, shape.rotated_size)
        query, latent, shared = self.compress(normed).split_with_sizes(sizes, dim=-1)
        query = normed if self.query_norm is None else self.query_norm(query)
        return self.query(query).view(len(normed), self.num_heads, shape.query_size), latent, shared

    def _halves(self, x: Tensor) -> Tensor:
        """[T, heads, rotated_size] with the dimensions that rotate together half of it apart."""
        if not self.shape.interleaved:
            return x
        return x.view(*x.shape[:2], self.shape.rotated_size // 2, 2).transpose(-1, -2).flatten(-2)
