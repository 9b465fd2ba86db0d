"""Steps with prompts in a fixed shape, so that a captured graph can run any step that is not larger.

    tokens     | those of the step | padding |
    sequences  | those of the step | none … none | padding |

Padding is a separate sequence, the last one: the tokens that a step has less than the shape. They lie in the dummy
page, which they write and read [finite-padding] [dummy-page]. So every row of every layer is computed from numbers, and
no sequence sees another's. Sequences between have no token, and nothing is read or written for them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.base.names import PADDING_ROW
from tandem_engine.forward.batch import ForwardBatch, ForwardMode

DUMMY_SLOT = 0
"""The first of the dummy page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShape:
    """Sizes of a step with padding."""

    tokens: int
    rows: int
    """Sequences, that of padding included."""
    extends: int
    """Sequences of more than one token, that of padding included."""

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `batch`, on the host, is not larger."""
        return (
            batch.num_tokens <= self.tokens
            and batch.num_sequences < self.rows
            and int((batch.extend_lens > 1).sum()) < self.extends
        )


def can_be_prompt(batch: ForwardBatch) -> bool:
    """Whether `batch`, on the host, computes prompts, and nothing that depends on lists of the host."""
    extends = batch.mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)
    return extends and not batch.eager and batch.adapters is None


def as_prompt(batch: ForwardBatch, shape: PromptShape) -> ForwardBatch:
    """`batch`, which fits `shape`, with its padding. Its page tables remain as they are: padding has the dummy page."""
    surplus = shape.tokens - batch.num_tokens
    return replace(
        batch,
        input_ids=_behind(batch.input_ids, shape.tokens),
        positions=_behind(batch.positions, shape.tokens),
        out_cache_loc=_behind(batch.out_cache_loc, shape.tokens, fill=DUMMY_SLOT),
        rows=_behind(batch.rows, shape.rows, fill=PADDING_ROW),
        seq_lens=_behind(batch.seq_lens, shape.rows, last=surplus),
        extend_lens=_behind(batch.extend_lens, shape.rows, last=surplus),
        windows=tuple(
            pages._replace(out_cache_loc=_behind(pages.out_cache_loc, shape.tokens, fill=DUMMY_SLOT))
            for pages in batch.windows
        ),
    )


def _behind(values: Tensor, size: int, *, fill: int = 0, last: int | None = None) -> Tensor:
    """`values` [N] int64 with `fill` behind them, up to `size`; the very last number is `last`, if it is given."""
    padded: npt.NDArray[Any] = np.full(size, fill, dtype=np.int64)
    padded[: len(values)] = values.numpy()
    if last is not None:
        padded[-1] = last
    return torch.from_numpy(padded)
