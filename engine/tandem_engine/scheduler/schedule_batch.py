"""Host truth of one step, and the frozen device view built from it.

    StepPlan ──▶ ScheduleBatch (requests, cursors) ──build──▶ ForwardBatch (tensors)

The view copies everything it shows, the page table rows included: requests and rows change while the
forward runs, and the forward must not notice [row-snapshot]. Work per request is a few list appends; all that
grows with the number of tokens is done by numpy.

    sequences    extends in plan order, then decodes
    samplers     the sequences that yield a token: last chunks and decodes, in the same order
    runs         a decode with drafts computes them behind its last token and samples after each: its row of
                 sampling is repeated for every position of its run
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.forward.forward_batch import RESOLVE, ForwardBatch, SamplingBatch
from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.forward.guesses import GuessedIds
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.pooled import PooledTokens
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.edit_columns import NO_EDITS, EditColumns
from tandem_engine.scheduler.mask_filler import open_masks
from tandem_engine.scheduler.penalty_slots import PenaltySlots
from tandem_engine.scheduler.prefill_adder import Extend
from tandem_engine.scheduler.prompt_positions import prompt_positions
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.speculation import NO_DRAFTS, StepDrafts
from tandem_engine.scheduler.stop import StopRule

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleBatch:
    """Who takes part in a step. Kept until the step has settled."""

    step: int
    extends: Sequence[Extend]
    decodes: Sequence[Request]
    drafts: StepDrafts = NO_DRAFTS

    @property
    def mode(self) -> ForwardMode:
        if self.drafts.chains:
            return ForwardMode.TARGET_VERIFY
        if not self.extends:
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.decodes else ForwardMode.EXTEND

    @property
    def samplers(self) -> list[Request]:
        return [*(extend.req for extend in self.extends if extend.samples), *self.decodes]

    @property
    def requests(self) -> list[Request]:
        return [*(extend.req for extend in self.extends), *self.decodes]

    @property
    def decode_runs(self) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Decodes with their drafts, () for those without: guesses by their indices."""
        return zip(self.decodes, self.drafts.chains or repeat(()), strict=False)

    @property
    def sampler_runs(self) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Samplers with their drafts, () for those without. Waits for guesses of a device."""
        yield from ((extend.req, ()) for extend in self.extends if extend.samples)
        yield from zip(self.decodes, self.drafts.known().chains or repeat(()), strict=False)

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """Drafts of each sampler; () when nobody has any."""
        chains = self.drafts.chains
        return (*(0 for extend in self.extends if extend.samples), *map(len, chains)) if chains else ()

    @property
    def extend_tokens(self) -> int:
        return sum(extend.stop - extend.start for extend in self.extends)

    def mark_launched(self) -> None:
        """Advance the cursors of requests past this step. After `build`: input ids depend on them."""
        for extend in self.extends:
            extend.req.launched_len = extend.stop
            extend.req.steps_in_flight += 1
            extend.req.tokens_in_flight += extend.samples
        for req in self.decodes:
            req.launched_len += 1
            req.steps_in_flight += 1
            req.tokens_in_flight += 1
        for req, chain in zip(self.decodes, self.drafts.chains, strict=False):
            req.launched_len += len(chain)
            req.tokens_in_flight += len(chain)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingColumns:
    """Sampling parameters of a list of requests: the same in every step that has the same samplers."""

    samplers: list[Request]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    logprobs: tuple[int, ...]
    logprob_ids: torch.Tensor | None
    all_greedy: bool
    any_min_tokens: bool
    constrained: tuple[int, ...]
    """Indices of samplers whose tokens are masked."""

    @staticmethod
    def of(samplers: list[Request]) -> "SamplingColumns":
        params = [req.sampling for req in samplers]
        wanted = tuple(-1 if p.logprobs is None else p.logprobs for p in params)
        return SamplingColumns(
            samplers=samplers,
            temperature=_floats([0.0 if p.greedy else p.temperature for p in params]),
            top_k=torch.from_numpy(_ints([p.top_k for p in params])),
            top_p=_floats([p.top_p for p in params]),
            min_p=_floats([p.min_p for p in params]),
            seed=torch.from_numpy(_ints([p.seed for p in params])),
            logprobs=wanted if max(wanted, default=-1) >= 0 else (),
            logprob_ids=_named([p.logprob_token_ids for p in params]),
            all_greedy=all(p.greedy for p in params),
            any_min_tokens=any(p.min_tokens for p in params),
            constrained=tuple(index for index, p in enumerate(params) if p.masked),
        )

    def repeated(self, counts: Ints) -> "SamplingColumns":
        """Each row `counts` [S] times: once for every position of its run."""
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            logprobs=tuple(self.logprobs[row] for row in rows.tolist()) if self.logprobs else (),
            logprob_ids=None if self.logprob_ids is None else self.logprob_ids[rows],
        )


@dataclass(kw_only=True, slots=True)
class BatchBuilder:
    """Makes `ForwardBatch`es. Keeps the sampling tensors of the last one while its samplers stay the same."""

    memory: KvMemory
    stop: StopRule
    slots: PenaltySlots
    columns: SamplingColumns = field(default_factory=lambda: SamplingColumns.of([]))
    edits: EditColumns = NO_EDITS

    def build(self, batch: ScheduleBatch, kv_progress: KvProgress | None = None) -> ForwardBatch:
        """The device view of `batch`, before `mark_launched`. `kv_progress` is to be told of its KV."""
        rows, starts, lens, sample_index = self._sequences(batch)
        draft_lens = batch.draft_lens
        seq_lens = starts + lens
        positions = _ranges(starts, lens)
        input_ids, guessed = self._input_ids(batch)
        table = self.memory.rows.table.numpy()
        return ForwardBatch(
            step=batch.step,
            mode=batch.mode,
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            out_cache_loc=torch.from_numpy(self._slots(table, np.repeat(rows, lens), positions)),
            rows=torch.from_numpy(rows),
            seq_lens=torch.from_numpy(seq_lens),
            extend_lens=torch.from_numpy(lens),
            # Indexing by an array copies: this is the snapshot.
            page_table=torch.from_numpy(table[rows, : self.memory.pages_for(int(seq_lens.max()))]),
            num_extend=len(rows) if draft_lens else len(batch.extends),
            sample_index=torch.from_numpy(sample_index),
            sampling=self._sampling(batch.samplers, seq_lens[sample_index], draft_lens),
            draft_lens=draft_lens,
            guessed=guessed,
            page_copies=tuple(copy for extend in batch.extends for copy in extend.copies),
            prompt_positions=prompt_positions(batch.extends),
            pooled=_pooled_tokens(batch.extends),
            kv_progress=kv_progress,
        )

    def _sequences(self, batch: ScheduleBatch) -> tuple[Ints, Ints, Ints, Ints]:
        """Per sequence row, first position and length; and which sequences sample."""
        rows, starts, lens, sampled = [], [], [], []
        for index, extend in enumerate(batch.extends):
            rows.append(extend.req.held_kv.row)
            starts.append(extend.start)
            lens.append(extend.stop - extend.start)
            if extend.samples:
                sampled.append(index)
        rows += [req.held_kv.row for req in batch.decodes]
        starts += [req.launched_len for req in batch.decodes]
        lens += [1 + len(chain) for chain in batch.drafts.chains] or [1] * len(batch.decodes)
        sampled += range(len(batch.extends), len(rows))
        return _ints(rows), _ints(starts), _ints(lens), _ints(sampled)

    def _input_ids(self, batch: ScheduleBatch) -> tuple[Ints, GuessedIds | None]:
        """Known tokens; `RESOLVE` for a decode whose last token is still being computed, and 0 for guesses."""
        ids: list[int] = []
        for extend in batch.extends:
            ids += extend.req.token_ids(extend.start, extend.stop)
        if not batch.drafts.chains:
            ids += [RESOLVE if req.tokens_in_flight else req.output_ids[-1] for req in batch.decodes]
            return _ints(ids), None
        guesses, first = batch.drafts.guesses, len(ids)
        for req, drafts in batch.decode_runs:
            assert not req.tokens_in_flight, f"{req.rid} is in flight while a step with drafts is built"
            ids += (req.output_ids[-1], *(drafts if guesses is None else repeat(0, len(drafts))))
        return _ints(ids), None if guesses is None else GuessedIds.of(guesses, batch.drafts.chains, first=first)

    def _slots(self, table: npt.NDArray[np.int32], rows: Ints, positions: Ints) -> Ints:
        page_size = self.memory.page_size
        pages: Ints = table[rows, positions // page_size].astype(np.int64)
        return pages * page_size + positions % page_size

    def _sampling(self, samplers: list[Request], seq_lens: Ints, draft_lens: tuple[int, ...]) -> SamplingBatch:
        changed = samplers != self.columns.samplers
        if changed:
            self.columns = SamplingColumns.of(samplers)
        if changed or self.edits.stale:
            self.edits = EditColumns.of(samplers, self.slots)
        columns, positions = self.columns, seq_lens
        if draft_lens:
            drafts = _ints(draft_lens)
            columns, positions = columns.repeated(drafts + 1), _ranges(seq_lens - drafts, drafts + 1)
        return SamplingBatch(
            temperature=columns.temperature,
            top_k=columns.top_k,
            top_p=columns.top_p,
            min_p=columns.min_p,
            seed=columns.seed,
            position=torch.from_numpy(positions),
            suppress=self._suppressed(samplers, draft_lens) if columns.any_min_tokens else (),
            logprobs=columns.logprobs,
            logprob_ids=columns.logprob_ids,
            all_greedy=columns.all_greedy,
            edits=self.edits.with_histories(),
            masks=open_masks(samplers, columns.constrained, draft_lens),
        )

    def _suppressed(self, samplers: Sequence[Request], draft_lens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Per row of sampling: each position of a run counts as the output token it would be [every-accepted-token]."""
        suppressed = tuple(
            self.stop.suppressed(req.sampling, len(req.output_ids) + req.tokens_in_flight + offset)
            for req, drafts in zip(samplers, draft_lens or repeat(0), strict=False)
            for offset in range(1 + drafts)
        )
        return suppressed if any(suppressed) else ()


def _named(ids: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
    """See `SamplingBatch.logprob_ids`."""
    longest = max(map(len, ids), default=0)
    if not longest:
        return None
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in ids], dtype=torch.int64)


def _pooled_tokens(extends: Sequence[Extend]) -> tuple[PooledTokens, ...]:
    """Prompt tokens of the step whose hidden states somebody wants."""
    if all(extend.req.pooled is None for extend in extends):
        return ()
    wanted, offset = [], 0
    for sequence, extend in enumerate(extends):
        pooled = extend.req.pooled
        positions = range(0) if pooled is None else pooled.positions(extend.start, extend.stop)
        if positions:
            shift = offset - extend.start
            tokens = torch.arange(positions.start + shift, positions.stop + shift)
            wanted.append(PooledTokens(sequence=sequence, first=positions.start, tokens=tokens))
        offset += extend.stop - extend.start
    return tuple(wanted)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _floats(values: Sequence[float]) -> torch.Tensor:
    """float32. By way of numpy: several times faster than `torch.tensor` of a list."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _ranges(starts: Ints, lens: Ints) -> Ints:
    """[start, start + len) of every sequence, one after the other."""
    first = np.cumsum(lens) - lens
    offsets: Ints = np.arange(int(lens.sum()), dtype=np.int64) + np.repeat(starts - first, lens)
    return offsets
