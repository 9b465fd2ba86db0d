"""What crosses from the scheduler to the device: frozen tensors, and what comes back.

Shapes use  T = tokens computed in this step, B = sequences, S = sequences that sample (S ≤ B), R = tokens
sampled (R = S without drafts), P = pages of the longest sequence. Sequences stand EXTEND first, then
DECODE; tokens of a sequence are contiguous and in order. Integer tensors are int64 unless noted.

A sequence with d drafts computes its last token and the drafts behind it, and samples after each of them:
d + 1 consecutive rows of sampling, one for each position.

`page_table` is a snapshot, not a view of the scheduler's rows: the scheduler may rewrite or recycle a
row while the forward that was launched with it still runs [row-snapshot] without any fence.
"""

from dataclasses import dataclass

import torch

from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.forward.guesses import GuessedIds
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.logit_edits import LogitEdits
from tandem_engine.forward.pooled import PooledSum, PooledTokens
from tandem_engine.forward.token_masks import TokenMasks
from tandem_engine.names import PageId

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
    """Token ids forbidden at this position (stop ids while min_tokens is not reached); () for nobody."""
    logprobs: tuple[int, ...] = ()
    """Per row −1 for none, n ≥ 0 for the sampled token and the top n; () when nobody asks."""
    logprob_ids: torch.Tensor | None = None
    """[R, K] tokens whose logprobs rows of `logprobs` want instead of the top ones, −1 behind a row's last (in all
    of a row that wants the top ones); None when nobody names any."""
    all_greedy: bool = False
    edits: LogitEdits | None = None
    """Penalties, biases and forbidden tokens, by sequence: see `runs.over_runs`. None when nobody asks."""
    masks: TokenMasks | None = None
    """Of the sequences with a grammar, by row; None when nobody has one. Not filled yet at launch: wait for them."""


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
    page_copies: tuple[tuple[PageId, PageId], ...] = ()
    """(source, target): pages to copy whole before anything is computed. No target is a source."""
    prompt_positions: tuple[PromptPositions, ...] = ()
    """At most one per EXTEND sequence; () when nobody asks."""
    pooled: tuple[PooledTokens, ...] = ()
    """At most one per EXTEND sequence; () when nobody wants an embedding."""
    draft_lens: tuple[int, ...] = ()
    """[S] drafts among the last tokens of each sampling sequence; () when there are none in the step."""
    guessed: GuessedIds | None = None
    """Input ids, 0 here, that are guesses of a draft network which the host need not know; None when it knows all."""
    kv_progress: KvProgress | None = None
    """Told of each layer whose KV is written, when somebody sends pages meanwhile."""
    on_host: "ForwardBatch | None" = None
    """The same step as host tensors, when these are on a device: whoever looks at those waits for the device
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
    """As many as `next_token_ids`, or empty when nobody asked."""
    prompt_scores: tuple[PromptScores, ...] = ()
    """One for each of `ForwardBatch.prompt_positions`."""
    pooled: tuple[PooledSum, ...] = ()
    """One for each of `ForwardBatch.pooled`."""
    unsound: tuple[int, ...] = ()
    """Which of the S sequences had NaN or +infinity for the best logit: their tokens mean nothing. Between
    sampling and verification of drafts: which of the R rows."""
    compute_s: float = 0.0
    """Time the forward itself took."""
