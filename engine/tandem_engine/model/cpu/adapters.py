"""Adapters as the kernel of small steps takes them: addresses of what their weights hold, and the tokens of each."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tandem_engine.kernels.cpu.pieces import Array
from tandem_engine.kernels.cpu.step_products import (
    DOWN,
    GATE_UP,
    MAX_PARTS,
    OUTPUT,
    PARTS,
    PROJECTIONS,
    QKV,
    TABLE_COLUMNS,
)
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterWeights, SiteWeights

PRODUCTS = {Site.QKV: QKV, Site.OUTPUT: OUTPUT, Site.GATE_UP: GATE_UP, Site.DOWN: DOWN}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTable:
    """Of one adapter. Has addresses of its weights, which must be kept."""

    places: Array
    """int64 [layers, PROJECTIONS, TABLE_COLUMNS]"""
    address: int
    """Of `places`."""
    most_rows: int
    """Of any A."""
    factors: tuple[Array, ...]
    """What `places` has the addresses of beyond the weights."""

    @classmethod
    def of(cls, weights: AdapterWeights, layers: int) -> "AdapterTable":
        places = np.zeros((layers, PROJECTIONS, TABLE_COLUMNS), np.int64)
        factors = []
        for (layer, site), each in weights.sites.items():
            factor = _factors(each)
            factors.append(factor)
            row = _row(each, factor)
            places[layer, PRODUCTS[site], : len(row)] = row
        most_rows = max((len(factor) for factor in factors), default=0)
        return cls(places=places, address=places.ctypes.data, most_rows=most_rows, factors=tuple(factors))


def _factors(site: SiteWeights) -> Array:
    """float32, for each row of A."""
    factors = np.empty(len(site.a), np.float32)
    for part in site.parts:
        factors[part.rows] = part.scale
    return factors


def _row(site: SiteWeights, factors: Array) -> list[int]:
    """Of a table."""
    assert site.a.is_contiguous(), "the kernel reads A row by row"
    assert len(site.parts) <= MAX_PARTS, f"{len(site.parts)} projections in one product"
    row = [site.a.data_ptr(), site.a.itemsize, len(site.a), factors.ctypes.data]
    assert len(row) == PARTS
    for part in site.parts:
        outputs, rank = part.b.shape
        assert part.b.t().is_contiguous(), "the kernel reads the outputs of one rank after the other"
        row += [part.rows.start, rank, part.outputs.start, outputs, part.b.data_ptr(), part.b.itemsize]
    return row


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTasks:
    """Of one step."""

    each: Array
    """int64 [adapters, ADAPTER_COLUMNS]"""
    tokens: Array
    """int64 [N], adapter after adapter."""
    low: Array
    """float32 [T, most rows of an A], scratch."""
    delta: Array
    """float32 [T, most outputs of a product of the model], scratch."""
    tables: tuple[AdapterTable, ...]
    """What `each` has the addresses of."""

    def write(self, step: Any) -> None:
        """To a `STEP`, which has addresses of this."""
        step["adapters"], step["num_adapters"] = self.each.ctypes.data, len(self.each)
        step["adapted_tokens"], step["num_adapted_tokens"] = self.tokens.ctypes.data, len(self.tokens)
        step["low"], step["low_rows"] = self.low.ctypes.data, self.low.shape[1]
        step["delta"], step["delta_outputs"] = self.delta.ctypes.data, self.delta.shape[1]


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """Of all adapters that steps had, as long as their weights exist. Forward thread only."""

    _made: "WeakKeyDictionary[AdapterWeights, AdapterTable]" = field(default_factory=WeakKeyDictionary)

    def tasks_of(self, adapters: StepAdapters, *, tokens: int, layers: int, outputs: int) -> AdapterTasks:
        """For a step of so many tokens, by a model of so many layers, whose widest product has so many outputs."""
        lists = adapters.rows.tokens
        tables = tuple(self._table(adapters.slots[slot], layers) for slot, _ in lists)
        # Lists: of the few tokens of a step an array for each adapter would take longer than what is in it.
        each: list[tuple[int, int, int]] = []
        indices: list[int] = []
        for table, (_, rows) in zip(tables, lists, strict=True):
            first = len(indices)
            indices += range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
            each.append((table.address, first, len(indices)))
        most_rows = max(table.most_rows for table in tables)
        return AdapterTasks(
            each=np.array(each, np.int64),
            tokens=np.array(indices, np.int64),
            low=np.empty((tokens, most_rows), np.float32),
            delta=np.empty((tokens, outputs), np.float32),
            tables=tables,
        )

    @property
    def count(self) -> int:
        """Adapters that have a table."""
        return len(self._made)

    def _table(self, weights: AdapterWeights, layers: int) -> AdapterTable:
        table = self._made.get(weights)
        if table is None:
            table = self._made[weights] = AdapterTable.of(weights, layers)
        return table
