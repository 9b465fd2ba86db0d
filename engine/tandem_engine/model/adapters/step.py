"""What the adapters of a step add to the products of its layers.

    delta = (x Aᵀ) · s Bᵀ       for the rows of each adapter, added to those rows of the product in place

Adjacent rows are not gathered, and in float32 an adapter adds to them by one product. Rows behind the step, which pad a
product, and rows without an adapter are neither read nor written, so the base model's tokens have the same bits in any
batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.forward.adapter_rows import AdapterRows
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterPart, AdapterWeights, SiteWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteDelta:
    """Implements `Delta` of one site of a layer."""

    additions: tuple[tuple[SiteWeights, Tensor | slice], ...]
    """Of each adapter with its rows."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Add to the rows in `out` [T, outputs], a product of `x` [T, in]."""
        for weights, rows in self.additions:
            picked = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
            shrunk = F.linear(picked.float(), weights.a.float())
            for part in weights.parts:
                _add(part, shrunk[:, part.rows], out[:, part.outputs], rows)

    def columns(self, first: int, stop: int) -> "SiteDelta":
        """See `Delta.columns`."""
        additions = ((_of_columns(weights, first, stop), rows) for weights, rows in self.additions)
        return SiteDelta(additions=tuple((weights, rows) for weights, rows in additions if weights.parts))


def _of_columns(weights: SiteWeights, first: int, stop: int) -> SiteWeights:
    parts = (part for part in weights.parts if first <= part.outputs.start < stop)
    moved = (replace(part, outputs=slice(part.outputs.start - first, part.outputs.stop - first)) for part in parts)
    return replace(weights, parts=tuple(moved))


def _add(part: AdapterPart, shrunk: Tensor, out: Tensor, rows: Tensor | slice) -> None:
    """out[rows] += s · shrunk Bᵀ"""
    b = part.b.to(out.dtype)
    if isinstance(rows, slice) and b.dtype is torch.float32:
        out[rows].addmm_(shrunk, b.t(), alpha=part.scale)
        return
    added = F.linear((shrunk * part.scale).to(b.dtype), b)
    if isinstance(rows, slice):
        out[rows] += added
    else:
        out.index_add_(0, rows, added)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAdapters:
    """The adapters of one step."""

    rows: AdapterRows
    slots: Sequence[AdapterWeights]
    """The weights in each slot."""

    def with_all_wanted(self) -> "StepAdapters":
        """See `AdapterRows.with_all_wanted`."""
        return replace(self, rows=self.rows.with_all_wanted())

    def delta(self, site: Site, layer: int, *, wanted: bool = False) -> SiteDelta | None:
        """What they add at `site` of `layer`, to rows of the wanted tokens or of all. None if that is nothing."""
        lists = self.rows.wanted if wanted else self.rows.tokens
        found = ((self.slots[slot].sites.get((layer, site)), rows) for slot, rows in lists)
        additions = tuple((weights, rows) for weights, rows in found if weights is not None)
        return SiteDelta(additions=additions) if additions else None
