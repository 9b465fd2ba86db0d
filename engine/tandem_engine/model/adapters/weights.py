"""An adapter in memory, as one rank needs it, and the digest that it is identified by.

    (layer, site)    A [R, in], the A of its projections one below the other
                     per projection: rows of A x, a range of outputs, B [outputs, r], s

A stays float32 and B has the model's dtype: A x is small, so it is computed and scaled in float32 and rounded once. The
factor s is not part of B, because s · B would be rounded too. B lies in memory as its transpose, the outputs of one
rank adjacent, which compiled steps read as they read panels (`kernels.cpu.step_products`).

Ranks cut an adapter as they cut the base. Where they share outputs, each has all of A and the rows of B for its
outputs; where they share inputs, each has the columns of A for its inputs and all of B, so that the base's one sum
over the ranks also sums what the adapter adds.

The digest covers rank and factor of each projection, and every byte of every tensor with its name, dtype and shape. It
is computed from the bytes that become the weights, whole on each rank, so all ranks have the same one, and a file that
is replaced later changes nothing.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import msgspec
import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.messages.kv_events import DIGEST_BYTES
from tandem_engine.model.adapters.checkpoint import AdapterCheckpoint, Pair
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.checkpoint_files import StoredTensor
from tandem_engine.model.checkpoint_folder import shown
from tandem_engine.model.layers.attention import rotary_order
from tandem_engine.model.tensor_names import expected_shapes, layer_prefix
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, Part, Split

ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPart:
    """What an adapter adds to the outputs of one projection."""

    rows: slice
    """Of A x."""
    outputs: slice
    """Of the site, on this rank."""
    b: Tensor
    """[outputs, r], dense as its transpose."""
    scale: float

    @classmethod
    def of(cls, *, rows: slice, outputs: slice, b: Tensor, scale: float) -> Self:
        """With `b` [outputs, r] laid out as its transpose."""
        return cls(rows=rows, outputs=outputs, b=b.t().contiguous().t(), scale=scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteWeights:
    """What an adapter adds to one product of a layer."""

    a: Tensor
    """float32 [R, in]"""
    parts: tuple[AdapterPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """Immutable and shared. One is equal to itself alone: `digest` compares contents."""

    digest: bytes
    rank: int
    """The largest."""
    sites: Mapping[tuple[int, Site], SiteWeights]
    """By layer."""


def load_adapter(
    checkpoint: AdapterCheckpoint, base: ModelConfig, *, dtype: torch.dtype, group: TpGroup
) -> AdapterWeights:
    """Read all tensors, and keep this rank's part. Raises `CheckpointError` for values that are not finite."""
    hashed = _Digest()
    shares = _Shares(base=base, shapes=expected_shapes(base), group=group)
    by_site: dict[tuple[int, Site], list[_Read]] = {}
    for pair in checkpoint.pairs:
        a, b = (hashed.read(tensor) for tensor in (pair.a, pair.b))
        hashed.of_pair(pair)
        kept = shares.of(pair, _sound(a, torch.float32, pair.a), _sound(b, dtype, pair.b))
        by_site.setdefault((pair.layer, pair.site), []).append(kept)
    return AdapterWeights(
        digest=hashed.digest(),
        rank=checkpoint.rank,
        sites={place: _site(reads) for place, reads in by_site.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """One pair, this rank's part."""

    a: Tensor
    b: Tensor
    outputs: slice
    scale: float


def _site(reads: list[_Read]) -> SiteWeights:
    parts, first = [], 0
    for read in reads:
        rows = slice(first, first + len(read.a))
        parts.append(AdapterPart.of(rows=rows, outputs=read.outputs, b=read.b, scale=read.scale))
        first = rows.stop
    return SiteWeights(a=torch.cat([read.a for read in reads]), parts=tuple(parts))


class _Digest:
    """Of what was read so far. Pairs come in the order of their names."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"tandem-adapter")

    def read(self, tensor: StoredTensor) -> Tensor:
        """Its values, after its name, dtype, shape and bytes became part of the digest."""
        values = tensor.read()
        self._hash.update(msgspec.json.encode((tensor.name, str(tensor.dtype), tensor.shape)))
        self._hash.update(values.flatten().view(torch.uint8).numpy().data)
        return values

    def of_pair(self, pair: Pair) -> None:
        self._hash.update(msgspec.json.encode((pair.layer, pair.projection, pair.rank)))
        self._hash.update(struct.pack("<d", pair.scale))

    def digest(self) -> bytes:
        return self._hash.digest()


def _sound(values: Tensor, dtype: torch.dtype, tensor: StoredTensor) -> Tensor:
    """`values` as `dtype`, a cast that can overflow."""
    cast = values.to(dtype)
    if not bool(cast.isfinite().all()):
        name = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{tensor.path}: tensor {shown(tensor.name)} holds NaN or infinity as {name}")
    return cast


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """Which part of each pair this rank keeps."""

    base: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Of the base's tensors."""
    group: TpGroup

    def of(self, pair: Pair, a: Tensor, b: Tensor) -> _Read:
        site, places = pair.site, dict(self._outputs(pair))
        if site.column_parallel:
            b = self._in_order_of_heads(pair, b)
            part = self._part(site, b.shape[0])
            b = b[part.start : part.stop].clone()
        else:
            part = self._part(site, a.shape[1])
            a = a[:, part.start : part.stop].clone()
        return _Read(a=a, b=b, outputs=places[pair.projection], scale=pair.scale)

    def _in_order_of_heads(self, pair: Pair, b: Tensor) -> Tensor:
        """As the base's rows of q and k, where heads of its checkpoint rotate otherwise than ours."""
        order = rotary_order(self.base.rope, head_dim=self.base.head_dim)
        if order is None or pair.projection not in ROTATED:
            return b
        return b.view(-1, self.base.head_dim, b.shape[1])[:, order].reshape(b.shape)

    def _outputs(self, pair: Pair) -> Iterator[tuple[str, slice]]:
        """Where the outputs of each projection of the pair's site are among those of this rank."""
        first = 0
        for projection in pair.site.value:
            length = self.shapes[f"{layer_prefix(pair.layer)}{projection}.weight"][0]
            held = self._part(pair.site, length).length if pair.site.column_parallel else length
            yield projection, slice(first, first + held)
            first += held

    def _part(self, site: Site, length: int) -> Part:
        unit = self.base.head_dim if site in (Site.QKV, Site.OUTPUT) else 1
        split = Split(dim=(OUTPUTS if site.column_parallel else INPUTS).dim, unit=unit)
        return split.part(length, rank=self.group.rank, size=self.group.size)
