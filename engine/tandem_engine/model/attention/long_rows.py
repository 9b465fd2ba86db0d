"""Rows of a step that a library computes (`prompt_choice`), next to those of our kernels.

    our kernels   list the work of all rows but these: their queries count as negative there
    a library     K and V of the row, gathered from its pages, a few K/V heads at a time ─▶ its part of the result

Which rows these are follows from each row alone: its queries, whether tokens are before them, and its layers' spec. So
a sequence's result does not depend on others. Only steps without a graph have such rows, since lengths are looked at on
the host; nothing here waits for the device.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tandem_engine.kernels.span import Span
from tandem_engine.kernels.triton.work_list import Rows
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.prompt_choice import NONE, PromptChoice
from tandem_engine.model.attention.prompt_libraries import DenseAttend

logger = logging.getLogger(__name__)

GATHER_BYTES = 128 << 20
"""Of K and V that are gathered at once, at least those of two K/V heads where there are as many."""


class LongRow(NamedTuple):
    """One row, and what computes it."""

    row: int
    """Of the batch."""
    start: int
    """Its first token in the step."""
    queries: int
    tokens: int
    """Of the sequence."""
    attend: DenseAttend


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPrompts:
    """How long rows of a pool's layers are computed."""

    choices: dict[Span | None, PromptChoice]
    """By span: what lists of work are for. Layers of one span have one choice."""
    least_queries: int
    failed: set[DenseAttend] = field(default_factory=set)
    """Those that raised in service, and are used no more."""

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec], choices: Sequence[PromptChoice], *, least_queries: int) -> Self | None:
        """`choices`: of each of `specs`. None where our kernels compute everything."""
        by_span: dict[Span | None, PromptChoice] = {}
        for spec, choice in zip(specs, choices, strict=True):
            same = by_span.get(spec.span, choice) == choice
            if not same:
                logger.info("long prompts of layers that see %s are ours: one choice does not suit all", spec.span)
            by_span[spec.span] = choice if same else NONE
        found = {span: choice for span, choice in by_span.items() if choice != NONE}
        return cls(choices=found, least_queries=least_queries) if found else None

    def rows_of(self, extend_lens: Sequence[int], seq_lens: Sequence[int], span: Span | None) -> tuple[LongRow, ...]:
        """Of a step whose rows have so many queries and tokens, those that a library computes in layers of `span`."""
        choice = self.choices.get(span, NONE)
        rows, start = [], 0
        for row, (queries, tokens) in enumerate(zip(extend_lens, seq_lens, strict=True)):
            attend = choice.of(tokens - queries) if queries >= self.least_queries else None
            if attend is not None and attend not in self.failed:
                rows.append(LongRow(row, start, queries, tokens, attend))
            start += queries
        return tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRows:
    """Of one step and span."""

    rows: tuple[LongRow, ...]
    others: Rows
    """All rows, as our kernels list them."""
    alone: bool
    """There is no other row."""
    failed: set[DenseAttend] | None = None
    """See `LongPrompts.failed`. None: what a library raises is the caller's."""

    @classmethod
    def of(cls, long: tuple[LongRow, ...], rows: Rows, *, failed: set[DenseAttend] | None = None) -> Self:
        """`rows`: of the batch."""
        extend_lens = rows.extend_lens.clone()
        for each in long:
            extend_lens[each.row : each.row + 1].neg_()
        others = rows._replace(extend_lens=extend_lens)
        return cls(rows=long, others=others, alone=len(long) == len(extend_lens), failed=failed)

    def attend(
        self, pool: KvPool, layer: int, spec: AttentionSpec, q: Tensor, out: Tensor, page_table: Tensor
    ) -> tuple[LongRow, ...]:
        """Write the results of these rows to `out`, [T, heads, head_dim]; returns those that a library failed at."""
        left: list[LongRow] = []
        for each in self.rows:
            part = slice(each.start, each.start + each.queries)
            try:
                attend_gathered(pool, layer, spec, each, q[part], out[part], page_table[each.row])
            except Exception as error:
                if self.failed is None:
                    raise
                if each.attend not in self.failed:
                    message = "long prompts are ours from now on: a library failed at %d tokens behind %d: %s"
                    logger.warning(message, each.queries, each.tokens - each.queries, error, exc_info=error)
                self.failed.add(each.attend)
                left.append(each)
        return tuple(left)

    def without(self, left: tuple[LongRow, ...], rows: Rows) -> tuple[Self, Rows]:
        """What remains, and `rows` of which `left` alone are work."""
        kept = tuple(each for each in self.rows if each not in left)
        extend_lens = -rows.extend_lens
        for each in left:
            extend_lens[each.row : each.row + 1].neg_()
        return self.of(kept, rows, failed=self.failed), rows._replace(extend_lens=extend_lens)


def attend_gathered(
    pool: KvPool, layer: int, spec: AttentionSpec, row: LongRow, q: Tensor, out: Tensor, pages: Tensor
) -> None:
    """q [queries, heads, head_dim] over the tokens that the row sees, of its `pages`."""
    page_size, kv_heads = pool.page_size, pool.data.shape[3]
    first = spec.first_seen(row.tokens - row.queries) // page_size
    held = pages[first : -(-row.tokens // page_size)]
    tokens, group = row.tokens - first * page_size, q.shape[1] // kv_heads
    head_bytes = 2 * len(held) * page_size * q.shape[2] * q.dtype.itemsize
    # Never one of several: a library that compiles would do it again for one.
    parts = min(-(-kv_heads * head_bytes // GATHER_BYTES), max(1, kv_heads // 2))
    for part in range(parts):
        heads = slice(kv_heads * part // parts, kv_heads * (part + 1) // parts)
        keys, values = (_gathered(side[:, heads], held)[:, :tokens] for side in pool.key_value(layer))
        queries = slice(heads.start * group, heads.stop * group)
        out[:, queries] = row.attend(q[:, queries], keys, values, spec)


def _gathered(side: Tensor, pages: Tensor) -> Tensor:
    """[pages, kv_heads, page_size, head_dim] to dense [kv_heads, tokens, head_dim] of `pages`."""
    return torch.index_select(side.transpose(0, 1), 1, pages).flatten(1, 2)
