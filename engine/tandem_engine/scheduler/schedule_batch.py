"""Host state of one step, and the frozen device view built from it.

    StepPlan ──▶ ScheduleBatch (requests, cursors) ──build──▶ ForwardBatch (tensors)

The view copies everything it shows, including the page table rows: requests and rows change while the forward runs,
which must not affect it [row-snapshot]. Work per request is a few list appends; numpy does everything that grows with
the number of tokens.

    sequences    extends in plan order, then decodes
    samplers     the sequences that yield a token: last chunks and decodes, in the same order
    runs         a decode with drafts computes them after its last token and samples after each: its row of
                 sampling is repeated for every position of its run

`EditColumns` has the logit edits of a list of requests in the device's form: `of` what follows from parameters, slots
and rows, which stays the same while samplers and rows do; `histories` what must be loaded for rows that were assigned
since the last step. Such rows are found by identity: every (re)admission of a request creates a new `RequestKv`, and
the device has the history of the one in `req.recalled`. No step of that request is in flight then, so the host has its
whole history [device-history] [history-rebuilt].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.forward.adapter_rows import NO_ADAPTER, AdapterRows
from tandem_engine.forward.batch import (
    RESOLVE,
    ForwardBatch,
    ForwardMode,
    GuessedIds,
    PromptPositions,
    SamplingBatch,
    wanted_tokens,
)
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.logit_edits import ANY, BadWords, History, LogitEdits, Penalties, TokenBiases, TokenSets
from tandem_engine.forward.results import PooledTokens
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_anchors import NO_MOVES, StateMoves
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.finishing import PenaltySlots
from tandem_engine.scheduler.gates.grammar import open_masks
from tandem_engine.scheduler.prefill_adder import Extend
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.speculation import NO_DRAFTS, StepDrafts
from tandem_engine.scheduler.stop import StopRule


@dataclass(frozen=True, kw_only=True, slots=True)
class EditColumns:
    """Edits of samplers, in their order."""

    edits: LogitEdits | None
    """Without histories; None when no request has edits."""
    recalling: tuple[Request, ...] = ()
    """Samplers whose edits depend on their tokens."""

    @staticmethod
    def of(samplers: Sequence[Request], slots: PenaltySlots) -> "EditColumns":
        """Requests that need a slot get one."""
        if not any(req.sampling.edits_logits for req in samplers):
            return NO_EDITS
        numbered = [(index, req) for index, req in enumerate(samplers) if req.sampling.edits_logits]
        return EditColumns(
            edits=LogitEdits(
                penalties=_penalties(numbered, slots),
                biases=_biases(numbered),
                allowed=_pairs([(index, token) for index, req in numbered for token in req.sampling.allowed_token_ids]),
                forbidden=_pairs(
                    [(index, word[0]) for index, req in numbered for word in req.sampling.bad_words if len(word) == 1]
                ),
                bad_words=_bad_words(numbered),
            ),
            recalling=tuple(req for _, req in numbered if req.sampling.recalls_tokens),
        )

    @property
    def stale(self) -> bool:
        """Some request has moved to a row that does not know its tokens: slots and rows here may be old ones."""
        return any(req.recalled is not req.kv for req in self.recalling)

    def with_histories(self) -> LogitEdits | None:
        """The edits of the next step. Histories are sent to the device only once."""
        if not self.stale:
            return self.edits
        assert self.edits is not None, "only requests with edits recall tokens"
        moved = [req for req in self.recalling if req.recalled is not req.kv]
        return replace(self.edits, histories=tuple(_recall(req) for req in moved))


NO_EDITS = EditColumns(edits=None)


def _recall(req: Request) -> History:
    assert not req.tokens_in_flight, f"request {req.rid} moved with {req.tokens_in_flight} tokens in flight"
    req.recalled = req.held_kv
    return History(
        row=req.held_kv.row,
        slot=req.penalty_slot,
        prompt_ids=req.origin_input_ids if req.sampling.repetition_penalty != 1.0 else (),
        output_ids=tuple(req.output_ids),
    )


Numbered = Sequence[tuple[int, Request]]
"""Samplers with edits, and their places among the samplers."""


def _penalties(numbered: Numbered, slots: PenaltySlots) -> Penalties | None:
    penalized = [(index, req) for index, req in numbered if req.sampling.penalized]
    if not penalized:
        return None
    params = [req.sampling for _, req in penalized]
    return Penalties(
        index=_int_tensor([index for index, _ in penalized]),
        slots=_int_tensor([slots.of(req) for _, req in penalized]),
        repetition=_pinned_floats([p.repetition_penalty for p in params]),
        frequency=_pinned_floats([p.frequency_penalty for p in params]),
        presence=_pinned_floats([p.presence_penalty for p in params]),
    )


def _biases(numbered: Numbered) -> TokenBiases | None:
    biases = [(index, token, bias) for index, req in numbered for token, bias in req.sampling.logit_bias]
    if not biases:
        return None
    indices, tokens, values = zip(*biases, strict=True)
    return TokenBiases(index=_int_tensor(indices), token_ids=_int_tensor(tokens), values=_pinned_floats(values))


def _pairs(pairs: Sequence[tuple[int, int]]) -> TokenSets | None:
    if not pairs:
        return None
    indices, tokens = zip(*pairs, strict=True)
    return TokenSets(index=_int_tensor(indices), token_ids=_int_tensor(tokens))


def _bad_words(numbered: Numbered) -> BadWords | None:
    words = [(index, req, word) for index, req in numbered for word in sequences(req.sampling)]
    if not words:
        return None
    longest = max(len(word) for _, _, word in words) - 1
    prefixes = np.full((len(words), longest), ANY, dtype=np.int64)
    for line, (_, _, word) in zip(prefixes, words, strict=True):
        line[longest + 1 - len(word) :] = word[:-1]
    recalled = {index: req for index, req, _ in words}
    return BadWords(
        index=_int_tensor([index for index, _, _ in words]),
        rows=_int_tensor([req.held_kv.row for _, req, _ in words]),
        prefixes=torch.from_numpy(prefixes),
        last=_int_tensor([word[-1] for _, _, word in words]),
        recalled_index=_int_tensor([*recalled]),
        recalled_rows=_int_tensor([req.held_kv.row for req in recalled.values()]),
    )


def sequences(sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Bad words of more than one token."""
    return [word for word in sampling.bad_words if len(word) > 1]


def _int_tensor(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _pinned_floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def prompt_positions(extends: Sequence[Extend]) -> tuple[PromptPositions, ...]:
    """What the step of `extends`, whose tokens come first and in this order, yields of their prompts' logprobs."""
    if all(extend.req.prompt_logprobs is None for extend in extends):
        return ()
    wanted, offset = [], 0
    for sequence, extend in enumerate(extends):
        positions = _of_extend(extend, sequence, offset)
        if positions is not None:
            wanted.append(positions)
        offset += extend.stop - extend.start
    return tuple(wanted)


def _of_extend(extend: Extend, sequence: int, offset: int) -> PromptPositions | None:
    """`offset`: where the tokens of the extend begin in the step."""
    collection = extend.req.prompt_logprobs
    positions = range(0) if collection is None else collection.positions(extend.start, extend.stop)
    if collection is None or not positions:
        return None
    tokens = torch.arange(positions.start, positions.stop) - 1 - extend.start + offset
    return PromptPositions(
        sequence=sequence,
        first=positions.start,
        tokens=tokens,
        token_ids=torch.tensor(extend.req.origin_input_ids[positions.start : positions.stop]),
        top=collection.top,
    )


Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleBatch:
    """The requests of a step. Kept until the step has settled."""

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
        """Drafts of each sampler; () without drafts."""
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
            top_k=torch.from_numpy(_int_array([p.top_k for p in params])),
            top_p=_floats([p.top_p for p in params]),
            min_p=_floats([p.min_p for p in params]),
            seed=torch.from_numpy(_int_array([p.seed for p in params])),
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
    adapter_slots: Mapping[bytes, int] = field(default_factory=dict)
    """Of adapters, by digest."""
    columns: SamplingColumns = field(default_factory=lambda: SamplingColumns.of([]))
    edits: EditColumns = NO_EDITS

    def build(self, batch: ScheduleBatch, kv_progress: KvProgress | None = None) -> ForwardBatch:
        """The device view of `batch`, before `mark_launched`. `kv_progress` receives the progress of its KV."""
        rows, starts, lens, sample_index = self._sequences(batch)
        draft_lens = batch.draft_lens
        seq_lens = starts + lens
        positions = _ranges(starts, lens)
        input_ids, guessed = self._input_ids(batch)
        table = self.memory.rows.table.numpy()
        # Indexing by an array copies: this is the snapshot.
        page_table = table[rows, : self.memory.pages_for(int(seq_lens.max()))]
        slots = self._slots(table, np.repeat(rows, lens), positions)
        moves = NO_MOVES if self.memory.anchors is None else self._state_moves(batch, starts, seq_lens)
        made = ForwardBatch(
            step=batch.step,
            mode=batch.mode,
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            out_cache_loc=torch.from_numpy(slots),
            rows=torch.from_numpy(rows),
            seq_lens=torch.from_numpy(seq_lens),
            extend_lens=torch.from_numpy(lens),
            page_table=torch.from_numpy(page_table),
            windows=tuple(window.located(page_table, slots) for window in self.memory.windows),
            num_extend=len(rows) if draft_lens else len(batch.extends),
            sample_index=torch.from_numpy(sample_index),
            sampling=self._sampling(batch.samplers, seq_lens[sample_index], draft_lens),
            draft_lens=draft_lens,
            guessed=guessed,
            page_copies=tuple(copy for extend in batch.extends for copy in extend.copies),
            state_copies=moves.copies,
            snapshots=moves.snapshots,
            prompt_positions=prompt_positions(batch.extends),
            pooled=_pooled_tokens(batch.extends),
            kv_progress=kv_progress,
            # A graph has every token of a run as a decode, which would change the state of its row.
            eager=self.memory.stateful and bool(draft_lens),
        )
        return made if not self.adapter_slots else self._adapted(made, batch)

    def _adapted(self, made: ForwardBatch, batch: ScheduleBatch) -> ForwardBatch:
        """`made` of `batch`, with the rows of its adapters."""
        digests = [req.space.adapter for req in batch.requests]
        if not any(digests):
            return made
        slots = [self.adapter_slots[digest] if digest else NO_ADAPTER for digest in digests]
        rows = AdapterRows.of(_int_array(slots), lens=made.extend_lens, wanted=wanted_tokens(made))
        return replace(made, adapters=rows)

    def _state_moves(self, batch: ScheduleBatch, starts: Ints, stops: Ints) -> StateMoves:
        kvs = [req.held_kv for req in batch.requests]
        return self.memory.state_moves(batch.step, kvs, starts.tolist(), stops.tolist())

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
        return _int_array(rows), _int_array(starts), _int_array(lens), _int_array(sampled)

    def _input_ids(self, batch: ScheduleBatch) -> tuple[Ints, GuessedIds | None]:
        """Known tokens; `RESOLVE` for a decode whose last token is still being computed, and 0 for guesses."""
        ids: list[int] = []
        for extend in batch.extends:
            ids += extend.req.token_ids(extend.start, extend.stop)
        if not batch.drafts.chains:
            ids += [RESOLVE if req.tokens_in_flight else req.output_ids[-1] for req in batch.decodes]
            return _int_array(ids), None
        guesses, first = batch.drafts.guesses, len(ids)
        for req, drafts in batch.decode_runs:
            assert not req.tokens_in_flight, f"{req.rid} is in flight while a step with drafts is built"
            ids += (req.output_ids[-1], *(drafts if guesses is None else repeat(0, len(drafts))))
        return _int_array(ids), None if guesses is None else GuessedIds.of(guesses, batch.drafts.chains, first=first)

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
            drafts = _int_array(draft_lens)
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
    """Prompt tokens of the step whose hidden states are needed."""
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


def _int_array(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _floats(values: Sequence[float]) -> torch.Tensor:
    """float32. By way of numpy: several times faster than `torch.tensor` of a list."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _ranges(starts: Ints, lens: Ints) -> Ints:
    """[start, start + len) of every sequence, one after the other."""
    first = np.cumsum(lens) - lens
    offsets: Ints = np.arange(int(lens.sum()), dtype=np.int64) + np.repeat(starts - first, lens)
    return offsets
