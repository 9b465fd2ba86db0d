"""All inputs of a step on a device, computed on the host before anything is queued.

    ForwardBatch, on the host ─▶ `step_inputs` ─▶ `StepInputs` ─▶ one copy ─▶ the same on the device

What follows from lengths, lists and flags is computed here, on the host: once a step is queued, reading any of its
tensors would wait for the device [no-device-wait]. Decodes, runs of drafts, and the text that a draft network has to
compute can also be written as `as_decodes`: every token is a separate decode, padded to a number of rows that a graph
was captured for. Prompts are padded to the shape of a graph (`forward.prompt_shape`).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem_engine.base.names import DUMMY_PAGE, PADDING_ROW
from tandem_engine.forward.batch import (
    ForwardBatch,
    ForwardMode,
    GroupPages,
    SamplingBatch,
    drafts_ahead,
    over_runs,
    wanted_tokens,
)
from tandem_engine.forward.future_map import token_rows
from tandem_engine.forward.logit_edits import History, LogitEdits, TokenSets
from tandem_engine.forward.prompt_shape import PromptShape, as_prompt

MAX_CATCH_UP = 4
"""Tokens of one sequence, each of which reads its KV. Mostly they are the last draft, if right, and one behind it."""

NO_NUMBERS = torch.empty(0)
NO_IDS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step. Tensors are all on the host, or all on the device."""

    batch: ForwardBatch
    """Padded, when `padding` is not 0."""
    token_rows: Tensor
    """[T] req_pool_idx of each token."""
    wanted: Tensor
    """[R + scored + pooled] tokens whose hidden states are needed, see `runs.wanted_tokens`."""
    sampled: int
    """R: as many of `wanted` are sampled after."""
    publish_rows: Tensor | None
    """[S] req_pool_idx of what is sampled; None while the last token of a sequence is not known yet."""
    sampling: SamplingBatch
    """By row of logits. Without parameters when all are greedy, and without masks, which come later."""
    recorded: LogitEdits | None
    """By sequence: whose tokens are to be remembered once they are sampled."""
    suppressed: TokenSets | None
    """`sampling.suppress` as pairs."""
    ahead: Tensor | None
    """See `runs.drafts_ahead`."""
    filtered: bool
    """Some row has top-k, top-p or min-p."""
    page_copies: Tensor | None
    """[2, N] sources and targets of `ForwardBatch.page_copies`."""
    padding: int = 0
    """Rows behind those of the step."""


def step_inputs(batch: ForwardBatch, *, pad_to: int | PromptShape | None = None) -> StepInputs:
    """What `batch`, on the host, needs. `pad_to`: as decodes, padded to so many rows, only what `can_be_decodes`; or a
    shape that it fits, only what `can_be_prompt`.
    """
    assert batch.on_host is None, "a step is prepared from its host tensors"
    wanted = wanted_tokens(batch)
    sampling = over_runs(batch)
    runs = len(batch.sample_index) + sum(batch.draft_lens)
    view = _padded_step(batch, pad_to)
    return StepInputs(
        batch=replace(view, sampling=NO_SAMPLING),
        token_rows=token_rows(view),
        wanted=wanted,
        sampled=runs,
        publish_rows=batch.rows[batch.sample_index] if runs and not batch.draft_lens else None,
        sampling=_for_device(sampling),
        recorded=None if batch.sampling.edits is None else replace(batch.sampling.edits, histories=()),
        suppressed=_pairs(sampling.suppress),
        ahead=drafts_ahead(batch),
        filtered=not sampling.all_greedy and _is_filtered(sampling),
        page_copies=torch.tensor(list(zip(*batch.page_copies, strict=True))) if batch.page_copies else None,
        padding=view.num_tokens - batch.num_tokens,
    )


def can_be_decodes(batch: ForwardBatch) -> bool:
    """Whether every token of the step may be a decode of its own: each is sampled after, or belongs to a short text
    that a draft network catches up with; and nothing else is asked of it while it computes.
    """
    if batch.eager or batch.prompt_positions or batch.pooled or batch.kv_progress is not None:
        return False
    if batch.mode is ForwardMode.DRAFT_EXTEND:
        return int(batch.extend_lens.max()) <= MAX_CATCH_UP
    return len(batch.sample_index) + sum(batch.draft_lens) == batch.num_tokens


def as_decodes(batch: ForwardBatch, rows: int) -> ForwardBatch:
    """Every token of `batch`, at most `rows`, as a decode; behind them rows that write to the dummy page and read one
    token of it, so that no softmax is over nothing [finite-padding] [dummy-page]. Lengths are those of the padded step
    [pad-then-metadata].

    All tokens of a run of drafts are stored before any attends, so one that is a decode of its own sees those before.
    """
    lens = batch.extend_lens.numpy()
    sequence = np.repeat(np.arange(len(lens)), lens)
    behind = (np.cumsum(lens) - 1)[sequence] - np.arange(len(sequence))
    seq_lens = _padded(batch.seq_lens.numpy()[sequence] - behind, rows, fill=1)
    pages = [
        GroupPages(
            page_table=_padded_table(each.page_table.numpy()[sequence], rows),
            out_cache_loc=_padded(each.out_cache_loc.numpy(), rows),
        )
        for each in (GroupPages(batch.page_table, batch.out_cache_loc), *batch.windows)
    ]
    return replace(
        batch,
        mode=ForwardMode.DECODE,
        input_ids=_padded(batch.input_ids.numpy(), rows),
        positions=_padded(batch.positions.numpy(), rows),
        out_cache_loc=pages[0].out_cache_loc,
        rows=_padded(batch.rows.numpy()[sequence], rows, fill=PADDING_ROW),
        seq_lens=seq_lens,
        extend_lens=torch.ones(rows, dtype=torch.int64),
        page_table=pages[0].page_table,
        windows=tuple(pages[1:]),
        num_extend=0,
        sample_index=torch.arange(rows),
        draft_lens=(),
    )


NO_SAMPLING = SamplingBatch(
    temperature=NO_NUMBERS,
    top_k=NO_IDS,
    top_p=NO_NUMBERS,
    min_p=NO_NUMBERS,
    seed=NO_IDS,
    position=NO_IDS,
    all_greedy=True,
)


def _padded_step(batch: ForwardBatch, to: int | PromptShape | None) -> ForwardBatch:
    if to is None:
        return batch
    return as_prompt(batch, to) if isinstance(to, PromptShape) else as_decodes(batch, to)


def _padded(values: "np.ndarray[tuple[int], np.dtype[np.int64]]", rows: int, *, fill: int = 0) -> Tensor:
    padded = np.full(rows, fill, dtype=np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)


def _padded_table(table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", rows: int) -> Tensor:
    padded = np.full((rows, table.shape[1]), DUMMY_PAGE, dtype=np.int32)
    padded[: len(table)] = table
    return torch.from_numpy(padded)


def _for_device(sampling: SamplingBatch) -> SamplingBatch:
    edits = _tensors_alone(sampling.edits)
    if sampling.all_greedy:
        return replace(NO_SAMPLING, edits=edits, logprobs=sampling.logprobs, logprob_ids=sampling.logprob_ids)
    return replace(sampling, edits=edits, suppress=(), masks=None)


def _tensors_alone(edits: LogitEdits | None) -> LogitEdits | None:
    """With the token lists of histories as tensors too."""
    if edits is None or not edits.histories:
        return edits
    return replace(edits, histories=tuple(_history(history) for history in edits.histories))


def _history(history: History) -> History:
    return replace(
        history,
        prompt_ids=torch.tensor(history.prompt_ids, dtype=torch.int64),
        output_ids=torch.tensor(history.output_ids, dtype=torch.int64),
    )


def _pairs(suppress: tuple[tuple[int, ...], ...]) -> TokenSets | None:
    pairs = [(row, token) for row, ids in enumerate(suppress) for token in ids]
    if not pairs:
        return None
    index, token_ids = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return TokenSets(index=index, token_ids=token_ids)


def _is_filtered(sampling: SamplingBatch) -> bool:
    return bool(((sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)).any())
