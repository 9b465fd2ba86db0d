"""Inputs and results of one step, between scheduler and device: frozen tensors.

Shapes use  T = tokens computed in this step, B = sequences, S = sequences that sample (S ≤ B), R = tokens sampled (R =
S without drafts), P = pages of the longest sequence. Sequences are ordered EXTEND first, then DECODE; tokens of a
sequence are contiguous and in order. Integer tensors are int64 unless noted. A sequence with d drafts computes its last
token and the drafts after it, and samples after each: d + 1 consecutive rows of sampling, whose edits include the
drafts before.

`page_table` is a snapshot, not a view of the scheduler's rows: the scheduler may rewrite or recycle a row while the
forward that was launched with it still runs [row-snapshot] without any fence.

`Guesses` are drafts that a device has and the host does not need before their step is queued:

    proposal    the steps of a draft network are queued; their samples stay on the device        `Runner.guess`
    step        the model's step, queued after them, reads its drafts from there                 `GuessedIds.fill`
    settlement  the host compares the drafts, which have arrived by then, with what was sampled

Penalties and grammars within a run of drafts, and other ranks, need them earlier and wait for all of them.

`TokenMasks` are not known yet when their step is launched:

    scheduler thread                                    forward thread
    masks = TokenMasks.open(rows, words)
    launch step N+1                            ─────▶   model forward of N+1
    settle step N: its tokens become known
    fill `bitmask` row by row, `release`       ─────▶   `wait`, mask the logits, sample

On a device sampling is queued `when_released`, by the scheduler thread. So a grammar costs the wait for the end of
settlement, not the overlap [masks-after-settling]. The scheduler releases masks in any case: rows allow all tokens
until they are filled, and the token of a finished request is dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from threading import Event
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from tandem_engine.base.names import PageId
from tandem_engine.forward.adapter_rows import AdapterRows
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.logit_edits import LogitEdits
from tandem_engine.forward.results import PooledSum, PooledTokens


class ForwardMode(Enum):
    EXTEND = "extend"
    """Prompt tokens that are not cached: a first prompt, a later chunk, an appended turn."""
    DECODE = "decode"
    """One token per request."""
    MIXED = "mixed"
    """EXTEND requests first, then DECODE requests as extends of length one."""
    TARGET_VERIFY = "target_verify"
    """Some running requests compute their last token and drafts behind it. All sequences count as extends."""
    DRAFT_EXTEND = "draft_extend"
    """A draft model catches up with tokens that it has not seen. Never a step of the scheduler."""
    IDLE = "idle"
    """Nothing: keeps ranks in step."""


Chains: TypeAlias = tuple[tuple[int, ...], ...]


class Guesses:
    """What the steps of one proposal sample, one step behind the other."""

    def __init__(self, results: "Callable[[], Sequence[ForwardResult]]", *, on_device: Tensor | None = None) -> None:
        """`results`: of the steps, waits for the device. `on_device`: [G] int64; None where steps are computed on the
        host, which knows them."""
        self.on_device = on_device
        self._read: Callable[[], Sequence[ForwardResult]] | None = results
        self._results: Sequence[ForwardResult] = ()

    @property
    def count(self) -> int:
        """G. Does not wait."""
        return len(self.tokens()) if self.on_device is None else self.on_device.numel()

    def tokens(self) -> list[int]:
        """[G] on the host. Waits for the device."""
        return [token for result in self._steps() for token in result.next_token_ids]

    def chains(self, indices: Chains) -> Chains:
        """Tokens in the place of `indices` among them. Waits for the device."""
        tokens = self.tokens()
        return tuple(tuple(tokens[index] for index in chain) for chain in indices)

    @property
    def compute_s(self) -> float:
        """Seconds that the device took for them. Waits for it."""
        return sum(result.compute_s for result in self._steps())

    def _steps(self) -> "Sequence[ForwardResult]":
        if self._read is not None:
            # What the steps hold of the device is released.
            self._results, self._read = self._read(), None
        return self._results


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessedIds:
    """Input ids of a step that are guesses."""

    places: Tensor
    """[N] among the tokens of the step."""
    sources: Tensor
    """[N] among the guesses."""
    guesses: Guesses

    @classmethod
    def of(cls, guesses: Guesses, chains: Chains, *, first: int) -> Self:
        """Of runs that begin at token `first`, each a known token and the guesses of a chain of indices."""
        starts = accumulate((1 + len(chain) for chain in chains), initial=first)
        places = [
            start + 1 + draft for start, chain in zip(starts, chains, strict=False) for draft in range(len(chain))
        ]
        sources = [index for chain in chains for index in chain]
        placed, taken = (torch.tensor(indices, dtype=torch.int64) for indices in (places, sources))
        return cls(places=placed, sources=taken, guesses=guesses)

    def fill(self, input_ids: Tensor) -> None:
        """Write them to `input_ids`, of the device and its copy of this. Queued."""
        guesses = self.guesses.on_device
        assert guesses is not None, "what the host knows is among the input ids from the start"
        input_ids.index_copy_(0, self.places, guesses.index_select(0, self.sources))

    def known(self) -> Iterator[tuple[int, int]]:
        """Place and token of each, from tensors of the host. Waits for the device."""
        tokens = self.guesses.tokens()
        return zip(self.places.tolist(), (tokens[source] for source in self.sources.tolist()), strict=True)


ALL_ALLOWED = -1
"""A word whose 32 tokens are all allowed."""

MAX_WAIT = 60.0
"""Seconds after which masks will not come any more: a bug, answered by a failed step instead of a hung engine."""


class MasksLateError(Exception):
    """The masks of a step were not released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMasks:
    """The masks of one step, for those of its sampling sequences that have a grammar."""

    rows: tuple[int, ...]
    """[G] the row of the step's logits that each mask is for."""
    bitmask: torch.Tensor
    """[G, words] int32 on the host, see `sampling.grammar.backend.Bits`. Not to be read before `wait`."""
    _released: Event = field(default_factory=Event)
    _then: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def open(cls, rows: tuple[int, ...], words: int) -> Self:
        """Masks that forbid nothing so far."""
        return cls(rows=rows, bitmask=torch.full((len(rows), words), ALL_ALLOWED, dtype=torch.int32))

    def release(self) -> None:
        """The bitmask is final. Idempotent."""
        self._released.set()
        while self._then:
            self._then.pop(0)()

    def when_released(self, then: Callable[[], None]) -> None:
        """Have `then` called by `release`, at once if that was. Called by the thread that releases."""
        if self._released.is_set():
            then()
        else:
            self._then.append(then)

    def wait(self) -> torch.Tensor:
        """The bitmask, once it is final."""
        if not self._released.wait(MAX_WAIT):
            raise MasksLateError(f"the token masks of a step were not filled within {MAX_WAIT:g} s")
        return self.bitmask


RESOLVE = -1
"""Input id of a token that only the device knows yet: read it from the FutureMap row [device-history]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """One row per sampled token: sequences in the order of `ForwardBatch.sample_index`, then positions.

    All tensors have length R.
    """

    temperature: torch.Tensor
    """float32; 0 means greedy."""
    top_k: torch.Tensor
    """0 keeps everything."""
    top_p: torch.Tensor
    """float32"""
    min_p: torch.Tensor
    """float32"""
    seed: torch.Tensor
    """int64"""
    position: torch.Tensor
    """Index of the token to be sampled in prompt + output: with the seed, the whole state of the noise."""
    suppress: tuple[tuple[int, ...], ...] = ()
    """Token ids forbidden at this position (stop ids while min_tokens is not reached); () if there are none."""
    logprobs: tuple[int, ...] = ()
    """Per row −1 for none, n ≥ 0 for the sampled token and the top n; () if no request has logprobs."""
    logprob_ids: torch.Tensor | None = None
    """[R, K] tokens whose logprobs rows of `logprobs` want instead of the top ones, −1 behind a row's last (in all
    of a row that wants the top ones); None when no row names any."""
    all_greedy: bool = False
    edits: LogitEdits | None = None
    """Penalties, biases and forbidden tokens, by sequence: see `over_runs`. None if no request has any."""
    masks: TokenMasks | None = None
    """Of the sequences with a grammar, by row; None if no sequence has one. Not filled yet at launch: wait for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPositions:
    """Prompt tokens of one sequence whose logprobs are wanted and whose predecessors this step computes."""

    sequence: int
    """Index into B."""
    first: int
    """Position in the prompt of the first of them; the others follow it."""
    tokens: torch.Tensor
    """[N] indices into T of the tokens before them, which predict them."""
    token_ids: torch.Tensor
    """[N] the prompt tokens themselves."""
    top: int
    """How many of the most likely tokens to report with each."""


class GroupPages(NamedTuple):
    """The pages of a step as a group of layers has them (`memory.window_pages`)."""

    page_table: torch.Tensor
    """As `ForwardBatch.page_table`; 0 also where the window has passed a block."""
    out_cache_loc: torch.Tensor
    """As `ForwardBatch.out_cache_loc`."""


class Snapshot(NamedTuple):
    """A state to be copied within a run of tokens."""

    sequence: int
    """Index into B."""
    length: int
    """Tokens of the sequence that the state is after; more than before the step, and less than after it."""
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step's work."""

    step: int
    mode: ForwardMode
    input_ids: torch.Tensor
    """[T]; `RESOLVE` where the FutureMap has the token."""
    positions: torch.Tensor
    """[T] absolute position of each token in its sequence."""
    out_cache_loc: torch.Tensor
    """[T] slot (page * page_size + offset) that receives each token's K and V."""
    rows: torch.Tensor
    """[B] req_pool_idx."""
    seq_lens: torch.Tensor
    """[B] tokens in the cache once this step has run."""
    extend_lens: torch.Tensor
    """[B] tokens computed in this step; 1 for a DECODE sequence. prefix_len = seq_len − extend_len."""
    page_table: torch.Tensor
    """[B, P] int32 page ids; entries past a sequence's last page are 0, the dummy page."""
    num_extend: int
    """Sequences [0, num_extend) are EXTEND, the rest DECODE."""
    sample_index: torch.Tensor
    """[S] indices into B; a chunk that is not the last of its prompt samples nothing."""
    sampling: SamplingBatch
    windows: tuple[GroupPages, ...] = ()
    """For each group of layers with a window, where it has those pages. () where all layers have the same ones."""
    page_copies: tuple[tuple[PageId, PageId], ...] = ()
    """(source, target): pages to copy whole before anything is computed. No target is a source."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """(source, target): slots of states to copy one after the other before anything is computed."""
    snapshots: tuple[Snapshot, ...] = ()
    """In the order of sequences and lengths."""
    prompt_positions: tuple[PromptPositions, ...] = ()
    """At most one per EXTEND sequence; () if no request has prompt logprobs."""
    pooled: tuple[PooledTokens, ...] = ()
    """At most one per EXTEND sequence; () if no request is an embedding."""
    draft_lens: tuple[int, ...] = ()
    """[S] drafts among the last tokens of each sampling sequence; () when there are none in the step."""
    guessed: GuessedIds | None = None
    """Input ids, 0 here, that are guesses of a draft network which the host need not know; None when it knows all."""
    adapters: AdapterRows | None = None
    """Of the sequences that have one; None when none has, and then nothing of a forward looks for adapters."""
    kv_progress: KvProgress | None = None
    """Notified of each layer whose KV is written, if pages are sent during the step."""
    eager: bool = False
    """Its operations are launched one by one, even where a graph of a device has room for it."""
    on_host: "ForwardBatch | None" = None
    """The same step as host tensors, when these are on a device: a reader of those waits for the device
    [no-device-wait]."""

    @property
    def host(self) -> "ForwardBatch":
        """The step as tensors that can be looked at."""
        return self if self.on_host is None else self.on_host

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.rows.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledLogprobs:
    """Logprobs of one position, sampled or of the prompt."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None
    """Of the token among all, 1 for the most likely; of prompt tokens only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """Answers a `PromptPositions`, whose `sequence` and `first` it repeats."""

    sequence: int
    first: int
    logprobs: tuple[SampledLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """What settlement needs, on the host."""

    step: int
    next_token_ids: tuple[int, ...]
    """One for each of the S sampling sequences, in the order of `sample_index`; with `accept_lens`, their runs
    one after the other. Between sampling and verification of drafts: one for each of the R rows."""
    accept_lens: tuple[int, ...] = ()
    """[S] tokens in each sequence's run when drafts were verified: accepted drafts and the bonus token. ()
    when every sequence has one token."""
    logprobs: tuple[SampledLogprobs | None, ...] = ()
    """As many as `next_token_ids`, or empty if no request has logprobs."""
    prompt_scores: tuple[PromptScores, ...] = ()
    """One for each of `ForwardBatch.prompt_positions`."""
    pooled: tuple[PooledSum, ...] = ()
    """One for each of `ForwardBatch.pooled`."""
    corrupted: tuple[int, ...] = ()
    """Which of the S sequences had NaN or +infinity for the best logit: their tokens mean nothing. Between
    sampling and verification of drafts: which of the R rows."""
    compute_s: float = 0.0
    """Time the forward itself took."""


NO_DRAFT = -1
"""Behind the last token of a shorter run."""


def sampled_tokens(batch: ForwardBatch) -> Tensor:
    """[R] the index among the step's tokens of each token that another is sampled after."""
    if batch.num_extend == 0:
        return batch.sample_index
    last = batch.extend_lens.cumsum(0)[batch.sample_index] - 1
    if not batch.draft_lens:
        return last
    runs = _run_lens(batch)
    behind = (runs.cumsum(0) - 1).repeat_interleave(runs) - torch.arange(int(runs.sum()))
    return last.repeat_interleave(runs) - behind


def wanted_tokens(batch: ForwardBatch) -> Tensor:
    """Indices among the step's tokens of those whose hidden states are needed: sampled after, then predicting wanted
    prompt tokens, then to be pooled.
    """
    sampled = sampled_tokens(batch)
    if not batch.prompt_positions and not batch.pooled:
        return sampled
    scored = (positions.tokens for positions in batch.prompt_positions)
    return torch.cat((sampled, *scored, *(pooled.tokens for pooled in batch.pooled)))


def over_runs(batch: ForwardBatch) -> SamplingBatch:
    """The sampling of `batch` with its edits by row, [R], as the other columns are."""
    sampling = batch.sampling
    if not batch.draft_lens or sampling.edits is None:
        return sampling
    return replace(sampling, edits=sampling.edits.over_runs(_run_lens(batch)))


def drafts_ahead(batch: ForwardBatch) -> Tensor | None:
    """[R, K] the drafts before each row, `NO_DRAFT` behind them; None when no edit would look at them."""
    edits = batch.sampling.edits
    if not batch.draft_lens or edits is None or (edits.penalties is None and edits.bad_words is None):
        return None
    lines = [
        [*chain[:count], *[NO_DRAFT] * (max(batch.draft_lens) - count)]
        for chain in drafts_of(batch)
        for count in range(len(chain) + 1)
    ]
    return torch.tensor(lines, dtype=torch.int64)


def drafts_of(batch: ForwardBatch) -> tuple[tuple[int, ...], ...]:
    """The drafts among the input ids of `batch`, on the host, for each sampling sequence. Waits for guesses."""
    ids = batch.input_ids.tolist()
    if batch.guessed is not None:
        for place, token in batch.guessed.known():
            ids[place] = token
    ends = batch.extend_lens.cumsum(0)[batch.sample_index].tolist()
    return tuple(tuple(ids[end - count : end]) for end, count in zip(ends, batch.draft_lens, strict=True))


def _run_lens(batch: ForwardBatch) -> Tensor:
    return torch.tensor(batch.draft_lens) + 1
