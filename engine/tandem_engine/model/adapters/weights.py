"""An adapter in memory, as one rank needs it, and the digest that it is identified by.

    (layer, site)    A [R, in], the A of its projections one below the other
                     per projection: rows of A x, a range of outputs, B [outputs, r], s

A is float32 and B has the model's dtype: A x is small, so it is computed and scaled in float32 and rounded once. For a
model with compiled steps, matrices that are stored in bfloat16 stay so, in half of the memory: these steps widen
numbers as they read them, which is exact. The factor s is not part of B, because s · B would be rounded too. B lies in
memory as its transpose, the outputs of one rank adjacent, which compiled steps read as they read panels
(`kernels.cpu.step_products`).

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
from itertools import accumulate
from typing import Self

import msgspec
import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import DeltaConfig, ModelConfig
from tandem_engine.messages.kv_events import DIGEST_BYTES
from tandem_engine.model.adapters.checkpoint import AdapterCheckpoint, Pair, base_shapes
from tandem_engine.model.adapters.tensor_names import RECURRENT, Site
from tandem_engine.model.checkpoint_files import StoredTensor
from tandem_engine.model.checkpoint_folder import shown
from tandem_engine.model.layers.attention import rotary_order
from tandem_engine.model.layers.delta import DeltaHeads
from tandem_engine.model.recurrent.blocks import heads_of_states, joined_sizes, order_by_part
from tandem_engine.model.tensor_names import layer_prefix
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, Part, Split

# Outputs of a layer with states: which of an adapter's rows of B a rank has, and where they stand among its own.
#
# ours, of a rank      [q | k | v | z] of its heads, then [b | a]
# Qwen3-Next           in_proj_qkvz and in_proj_ba, of one key head after the other
# Qwen3.5              in_proj_qkv, _z, _b and _a


def recurrent_rows(projection: str, delta: DeltaConfig, *, rank: int, size: int) -> tuple[slice, Tensor]:
    """Of `projection`, such as `linear_attn.in_proj_z`, on `rank` of `size`: outputs of the site, and rows of B."""
    heads = heads_of_states(delta, size)
    name = projection.removeprefix("linear_attn.in_proj_")
    first, length = _places(heads)[name]
    return slice(first, first + length), _rows(name, heads, rank=rank, size=size)


def _places(heads: DeltaHeads) -> dict[str, tuple[int, int]]:
    """First output and number of outputs, by the ends of names."""
    convolved = 2 * heads.key_width + heads.value_width
    rates = convolved + heads.value_width
    return {
        "qkvz": (0, rates),
        "qkv": (0, convolved),
        "z": (convolved, heads.value_width),
        "ba": (rates, 2 * heads.values),
        "b": (rates, heads.values),
        "a": (rates + heads.values, heads.values),
    }


def _rows(name: str, heads: DeltaHeads, *, rank: int, size: int) -> Tensor:
    inputs, rates = joined_sizes(heads)
    grouped = {"qkvz": inputs, "ba": rates}.get(name)
    if grouped is not None:
        return rank * heads.keys * sum(grouped) + order_by_part(heads.keys, grouped)
    widths = {"qkv": (heads.key_width, heads.key_width, heads.value_width), "z": (heads.value_width,)}
    found, first = [], 0
    for width in widths.get(name, (heads.values,)):
        found.append(torch.arange(first + rank * width, first + (rank + 1) * width))
        first += size * width
    return torch.cat(found)


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
    """float32 or bfloat16 [R, in]"""
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
    checkpoint: AdapterCheckpoint, base: ModelConfig, *, dtype: torch.dtype, group: TpGroup, keeps_halves: bool = False
) -> AdapterWeights:
    """Read all tensors, and keep this rank's part. Raises `CheckpointError` for values that are not finite.

    `keeps_halves`: what is stored in bfloat16 stays bfloat16.
    """
    hashed = _Digest()
    shares = _Shares(base=base, shapes=base_shapes(base), group=group)
    by_site: dict[tuple[int, Site], list[_Read]] = {}
    for pair in checkpoint.pairs:
        a, b = (hashed.read(tensor) for tensor in (pair.a, pair.b))
        hashed.of_pair(pair)
        of_a, of_b = (
            torch.bfloat16 if keeps_halves and read.dtype is torch.bfloat16 else computed
            for read, computed in ((a, torch.float32), (b, dtype))
        )
        kept = shares.of(pair, _sound(a, of_a, pair.a), _sound(b, of_b, pair.b))
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
    placed: tuple[tuple[slice, Tensor], ...]
    """Outputs of the site, and B of them: several where a projection is in several products."""
    scale: float


def _site(reads: list[_Read]) -> SiteWeights:
    parts, first = [], 0
    for read in reads:
        rows = slice(first, first + len(read.a))
        parts += [AdapterPart.of(rows=rows, outputs=outputs, b=b, scale=read.scale) for outputs, b in read.placed]
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
        if pair.site.column_parallel:
            placed = tuple((outputs, b[rows]) for outputs, rows in self._rows(pair))
            return _Read(a=a, placed=placed, scale=pair.scale)
        part = self._part(pair, a.shape[1])
        kept = a[:, part.start : part.stop].clone()
        return _Read(a=kept, placed=((slice(0, len(b)), b),), scale=pair.scale)

    def _rows(self, pair: Pair) -> Iterator[tuple[slice, Tensor]]:
        """Outputs of the pair's site on this rank, and which rows of its B they are."""
        if pair.projection in RECURRENT:
            assert self.base.delta is not None, f"{pair.projection} of a layer without a state"
            yield recurrent_rows(pair.projection, self.base.delta, rank=self.group.rank, size=self.group.size)
            return
        lengths = {projection: self._length(pair, projection) for projection in pair.site.value}
        held = {projection: self._part(pair, length) for projection, length in lengths.items()}
        before = [*accumulate((part.length for part in held.values()), initial=0)]
        first, part = before[pair.site.value.index(pair.projection)], held[pair.projection]
        heads = self._heads(pair, lengths[pair.projection])
        own = slice(part.start, part.stop)
        yield slice(first, first + part.length), heads[0][own]
        if len(heads) > 1:
            # Gates are a product of their own, behind that of q, k and v.
            yield slice(before[-1], before[-1] + part.length), heads[1][own]

    def _heads(self, pair: Pair, length: int) -> tuple[Tensor, ...]:
        """Rows of B in the order of the base's, where heads of its checkpoint rotate otherwise than ours; of queries
        with gates, those of each."""
        size, order = self.base.head_dim, rotary_order(self.base.rope, head_dim=self.base.head_dim)
        if self._is_gated(pair.projection):
            query, gate = torch.arange(2 * length).view(-1, 2, size).unbind(1)
            return (query if order is None else query[:, order]).flatten(), gate.flatten()
        rows = torch.arange(length)
        if order is None or pair.projection not in ROTATED:
            return (rows,)
        return (rows.view(-1, size)[:, order].flatten(),)

    def _is_gated(self, projection: str) -> bool:
        return self.base.output_gate and projection == ROTATED[0]

    def _length(self, pair: Pair, projection: str) -> int:
        """Outputs of `projection`, without gates."""
        outputs = self.shapes[f"{layer_prefix(pair.layer)}{projection}.weight"][0]
        return outputs // 2 if self._is_gated(projection) else outputs

    def _part(self, pair: Pair, length: int) -> Part:
        unit = self.base.head_dim if pair.site in (Site.QKV, Site.OUTPUT) else 1
        if pair.projection in RECURRENT and self.base.delta is not None:
            unit = self.base.delta.value_size
        split = Split(dim=(OUTPUTS if pair.site.column_parallel else INPUTS).dim, unit=unit)
        return split.part(length, rank=self.group.rank, size=self.group.size)
