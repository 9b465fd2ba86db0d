"""Token embedding.

Where a model scores tokens by the table that it looks them up in, and that lies in panels for the scores
(`model.fused.panels`), a large table is there but once: rows are gathered from the panels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.model.layers.linear import PackedLinear, Projection

if TYPE_CHECKING:
    from tandem_engine.model.fused.panels import Panels

TokenEmbedding = Callable[[Tensor], Tensor]
"""[T] int64 to a fresh [T, hidden] that the caller may write to."""

MIN_SHARED_BYTES = 16 << 20
"""Of a table. A row in panels is a cache line for each word or two; below, memory is not worth even that."""


class Table(Protocol):
    """[rows, hidden]"""

    def __len__(self) -> int: ...

    def __call__(self, rows: Tensor) -> Tensor:
        """[T] int64, each a row of the table, to a fresh [T, hidden]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTable:
    """Implements `Table`: row after row."""

    weight: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelTable:
    """Implements `Table`: the weight of a projection to its rows."""

    panels: "Panels"
    words: Tensor
    """int32 [panels, outputs of a panel, words of a row], of the same memory."""
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.panels.outputs

    def __call__(self, rows: Tensor) -> Tensor:
        width = self.words.shape[1]
        # Behind the last row there are others, of zeros.
        least, most = torch.aminmax(rows) if len(rows) else (0, 0)
        if not 0 <= int(least) <= int(most) < len(self):
            raise IndexError(f"token ids {int(least)} to {int(most)} lie outside of the table's {len(self)} rows")
        return self.words[rows // width, rows % width].view(self.dtype)


def table_of(weight: Tensor, scores: Projection | None) -> Table:
    """The rows of `weight`; `scores` is the projection by the same weight, if there is one."""
    few = scores.few if isinstance(scores, PackedLinear) else None
    if few is None or weight.nbytes < MIN_SHARED_BYTES:
        return DenseTable(weight=weight)
    return PanelTable(panels=few.panels, words=few.panels.words(weight.dtype), dtype=weight.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Implements `TokenEmbedding`: rows of a [vocab, hidden] table."""

    table: Table
    scale: Tensor | None = None
    """Factor of the rows, a scalar in the table's dtype: rounded as transformers rounds it."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self.table(token_ids)
        return rows if self.scale is None else rows.mul_(self.scale)
