"""A model that reads its KV: any mistake with rows and pages becomes a wrong token.

The "KV" of a token is (token id, position), the same in every layer. Attention reads slots [0, seq_len)
through the page table, as real attention does, and the next token is a hash of what it found. A stale row, a
page that two requests share, a double free or a late write changes the hash, so a test that compares outputs with
`next_token` over the plain history finds it in milliseconds.

Positions are hashed too: a page of the right tokens in the wrong place is also wrong.

Where a request edits its logits, the hash is the peak of a ramp of logits and the real editor does the rest, so that
its history on the device is tested with everything else. Prompt logprobs are hashes of what was read up to there.
"""

import struct
from collections.abc import Container, Iterator, Sequence, Set
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.base.names import DUMMY_PAGE
from tandem_engine.forward.batch import (
    ForwardBatch,
    ForwardResult,
    PromptPositions,
    PromptScores,
    SampledLogprobs,
    SamplingBatch,
    drafts_ahead,
    over_runs,
)
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.forward.results import PooledSum, PooledTokens
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.page_copies import PageCopier
from tandem_engine.memory.pool import KvPool
from tandem_engine.sampling.logits_processor import LogitEditor
from tandem_testing.fake_states import BEGIN, FakeStates, State, following

RAMP_TOP = 3.0
RAMP_STEP = 0.25
HIDDEN_SIZE = 2
NO_HIDDEN = torch.zeros(HIDDEN_SIZE, dtype=torch.float64)


def make_fake_pool(*, num_pages: int, page_size: int, num_layers: int = 1, num_kv_heads: int = 1) -> KvPool:
    """A pool whose K is a token id and whose V is a position, in all heads; transfers can move its pages."""
    return KvPool(
        num_pages=num_pages,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=1,
        page_size=page_size,
        dtype=torch.int64,
        device="cpu",
    )


def next_token(
    history: Sequence[int],
    *,
    vocab_size: int,
    noise: tuple[int, int] | None = None,
    suppress: Container[int] = (),
) -> int:
    """The token after `history`. `noise` is (seed, position) when sampling, None when greedy."""
    tokens = np.asarray(history, dtype=np.int64)
    digest = _digest(tokens, np.arange(len(tokens), dtype=np.int64))
    return _token(digest, vocab_size, noise, suppress)


def ramp(token: int, vocab_size: int) -> torch.Tensor:
    """[V] float32 logits whose largest is that of `token`, those of the ids after it each a step lower."""
    return RAMP_TOP - RAMP_STEP * ((torch.arange(vocab_size) - token) % vocab_size)


def prompt_logprob(history: Sequence[int], token: int) -> float:
    """The logprob of prompt token `token` after `history`: any number that depends on all of it."""
    tokens = np.asarray(history, dtype=np.int64)
    return _logprob_of(_digest(tokens, np.arange(len(tokens), dtype=np.int64)), token)


def hidden_state(history: Sequence[int]) -> torch.Tensor:
    """[HIDDEN_SIZE] float64 hidden state of the last token of `history`: whole numbers that depend on all of it."""
    tokens = np.asarray(history, dtype=np.int64)
    return _hidden_of(_digest(tokens, np.arange(len(tokens), dtype=np.int64)))


class WindowLayer(NamedTuple):
    """A layer that sees the newest `tokens`, and has pages of its own."""

    tokens: int
    pool: KvPool


class FakeModel:
    """Runs `ForwardBatch`es over a fake pool. Batches run one after the other, in launch order."""

    def __init__(
        self,
        *,
        pool: KvPool,
        vocab_size: int,
        max_rows: int = 1024,
        host_pool: HostPool | None = None,
        windows: Sequence[WindowLayer] = (),
        states: FakeStates | None = None,
    ) -> None:
        """`windows`: further layers, which have to agree with the others as far as they see. `states`: of a layer that
        keeps them, which have to agree with the pages."""
        self.pool = pool
        self.windows = windows
        self.states = states
        self._after: list[State] = []
        """Of each sequence of the newest step."""
        self.copy = PageCopier(pool, host_pool, states)
        """What an executor runs between forwards."""
        self.vocab_size = vocab_size
        self.forwards = 0
        self._future_map = FutureMap(max_rows, debug=True)
        self._editor = LogitEditor()

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Store, attend, sample, publish."""
        self.forwards += 1
        if batch.page_copies:
            self.pool.copy_pages(batch.page_copies)
        self._store(batch)
        forbidden = _forbidden(batch.sampling)
        positions = enumerate(_sampled_positions(batch))
        sampled = torch.tensor([self._sample(batch, row, at, forbidden[row]) for row, at in positions]).long()
        if batch.sampling.edits is not None:
            sampled = self._edited(sampled, batch)
        if not batch.draft_lens:
            self._future_map.publish(batch.rows[batch.sample_index], sampled)
            self.record(batch, sampled[:, None])
        tokens = tuple(sampled.tolist())
        return ForwardResult(
            step=batch.step,
            next_token_ids=tokens,
            logprobs=self._logprobs(batch.sampling, tokens),
            prompt_scores=tuple(self._scores(batch, positions) for positions in batch.prompt_positions),
            pooled=tuple(self._pooled(batch, wanted) for wanted in batch.pooled),
        )

    def record(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        """See `ModelRunner.record`."""
        self._editor.record(batch.sampling.edits, token_ids)

    def accept(self, accept_lens: Sequence[int]) -> None:
        """See `ModelRunner.accept`: tokens are a function of KV alone."""

    def _edited(self, tokens: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What is chosen when the tokens [R] that would have been are the peaks of ramps of logits."""
        logits = torch.stack([ramp(token, self.vocab_size) for token in tokens.tolist()])
        sampling = over_runs(batch)
        edited = self._editor.edit(
            logits, sampling.edits, sampling.suppress, masks=sampling.masks, ahead=drafts_ahead(batch)
        )
        return edited.argmax(dim=1)

    def _store(self, batch: ForwardBatch) -> None:
        slots = batch.out_cache_loc
        for each in (slots, *(pages.out_cache_loc for pages in batch.windows)):
            assert len({*each.tolist()}) == each.numel(), f"step {batch.step} writes a slot twice"
            assert int(each.min()) // self.pool.page_size > DUMMY_PAGE, f"step {batch.step} writes to the dummy page"
        ids = self._resolved(batch)
        for window, pages in zip(self.windows, batch.windows, strict=True):
            window.pool.store(0, ids.view(-1, 1, 1), batch.positions.view(-1, 1, 1), pages.out_cache_loc)
        for layer in range(self.pool.layout.layers):
            self.pool.store(layer, ids.view(-1, 1, 1), batch.positions.view(-1, 1, 1), slots)
            if batch.kv_progress is not None:
                batch.kv_progress.wrote(layer)
        if self.states is not None:
            self._after = self.states.step(batch, ids)

    def _resolved(self, batch: ForwardBatch) -> torch.Tensor:
        # torch's repeat_interleave starts a thread team, which costs a tiny batch more than all the rest.
        rows = np.repeat(batch.rows.numpy(), batch.extend_lens.numpy())
        return self._future_map.resolve(batch.input_ids, torch.from_numpy(rows))

    def _sample(self, batch: ForwardBatch, row: int, at: "SampledPosition", forbidden: Set[int]) -> int:
        sampling = batch.sampling
        greedy = sampling.all_greedy or float(sampling.temperature[row]) == 0.0
        position = int(sampling.position[row])
        assert position == at.length, f"step {batch.step} samples position {position} after {at.length} tokens"
        return _token(
            self._read(batch, at.sequence, at.length),
            self.vocab_size,
            None if greedy else (int(sampling.seed[row]), position),
            forbidden,
        )

    def _read(self, batch: ForwardBatch, sequence: int, length: int) -> int:
        """Digest of the KV of one sequence, as it stands in the pool now."""
        pages = batch.page_table[sequence][: -(-length // self.pool.page_size)].long()
        # [pages, layers, 2, heads, slots] to [layers * heads, 2, tokens]
        kv = self.pool.data[pages].squeeze(-1).permute(1, 3, 2, 0, 4).flatten(3).flatten(0, 1)[..., :length]
        tokens, positions = kv[0].contiguous().numpy()
        digest = _digest(tokens, positions)
        sound = bool((kv == kv[0]).all()) and all(
            self._agrees(window, pages.page_table[sequence].long(), kv[0])
            for window, pages in zip(self.windows, batch.windows, strict=True)
        )
        if self.states is not None and length == int(batch.seq_lens[sequence]):
            sound = sound and self._after[sequence] == following(BEGIN, tokens.tolist())
        return digest if sound else digest ^ 1

    def _agrees(self, window: WindowLayer, page_table: torch.Tensor, kv: torch.Tensor) -> bool:
        """Whether the newest tokens of kv [2, tokens] are those of the window's layer."""
        seen = torch.arange(max(0, kv.shape[1] - window.tokens), kv.shape[1])
        pages, slots = page_table[seen // self.pool.page_size], seen % self.pool.page_size
        return torch.equal(window.pool.data[pages, 0, :, 0, slots, 0].T, kv[:, seen])

    def _scores(self, batch: ForwardBatch, wanted: PromptPositions) -> PromptScores:
        """Reads the KV before each position, and checks that its predecessor is computed in this step."""
        before = torch.arange(wanted.first, wanted.first + len(wanted.tokens)) - 1
        assert torch.equal(batch.positions[wanted.tokens], before), f"step {batch.step} scores the wrong tokens"
        logprobs = tuple(
            self._prompt_logprob(self._read(batch, wanted.sequence, wanted.first + index), token, wanted.top)
            for index, token in enumerate(wanted.token_ids.tolist())
        )
        return PromptScores(sequence=wanted.sequence, first=wanted.first, logprobs=logprobs)

    def _pooled(self, batch: ForwardBatch, wanted: PooledTokens) -> PooledSum:
        """Reads the KV up to each position, and checks that it is computed in this step."""
        positions = torch.arange(wanted.first, wanted.first + len(wanted.tokens))
        assert torch.equal(batch.positions[wanted.tokens], positions), f"step {batch.step} pools the wrong tokens"
        digests = (self._read(batch, wanted.sequence, position + 1) for position in positions.tolist())
        total = sum(map(_hidden_of, digests), NO_HIDDEN)
        return PooledSum(sequence=wanted.sequence, first=wanted.first, count=len(positions), total=total)

    def _prompt_logprob(self, digest: int, token: int, wanted: int) -> SampledLogprobs:
        logprob = _logprob_of(digest, token)
        top = tuple(((token + i) % self.vocab_size, logprob - i) for i in range(wanted))
        return SampledLogprobs(logprob=logprob, top=top, rank=1)

    def _logprobs(self, sampling: SamplingBatch, tokens: Sequence[int]) -> tuple[SampledLogprobs | None, ...]:
        none: list[list[int]] = [[]] * len(tokens)
        named = none if sampling.logprob_ids is None else sampling.logprob_ids.tolist()
        rows = zip(sampling.logprobs, tokens, named, strict=False)
        return tuple(None if wanted < 0 else self._logprob(token, wanted, ids) for wanted, token, ids in rows)

    def _logprob(self, token: int, wanted: int, named: Sequence[int]) -> SampledLogprobs:
        top = tuple((other, -2.0 - other) for other in named if other >= 0)
        top = top or tuple(((token + i) % self.vocab_size, -1.0 - i) for i in range(wanted))
        return SampledLogprobs(logprob=-1.0 - token / self.vocab_size, top=top)


class SampledPosition(NamedTuple):
    """A token is sampled after the first `length` tokens of a sequence."""

    sequence: int
    length: int


def _sampled_positions(batch: ForwardBatch) -> Iterator[SampledPosition]:
    drafts = batch.draft_lens or (0,) * len(batch.sample_index)
    for sequence, count in zip(batch.sample_index.tolist(), drafts, strict=True):
        length = int(batch.seq_lens[sequence])
        yield from (SampledPosition(sequence, length - behind) for behind in range(count, -1, -1))


def _digest(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> int:
    return crc32(positions.tobytes(), crc32(tokens.tobytes()))


def _logprob_of(digest: int, token: int) -> float:
    return -(crc32(struct.pack("<q", token), digest) % 4096) / 1024


def _hidden_of(digest: int) -> torch.Tensor:
    return torch.tensor([digest % 4093, digest % 127 - 63], dtype=torch.float64)


def _forbidden(sampling: SamplingBatch) -> list[Set[int]]:
    """Per row, the suppressed tokens and those its mask forbids; nothing where logits are edited."""
    if sampling.edits is not None or not (sampling.suppress or sampling.masks):
        return [set()] * len(sampling.temperature)
    forbidden: list[Set[int]] = [set(ids) for ids in sampling.suppress] or [set() for _ in sampling.temperature]
    if sampling.masks is not None:
        bits = np.unpackbits(sampling.masks.wait().numpy().view(np.uint8), axis=1, bitorder="little")
        for row, allowed in zip(sampling.masks.rows, bits, strict=True):
            forbidden[row] |= {*np.flatnonzero(allowed == 0).tolist()}
    return forbidden


def _token(digest: int, vocab_size: int, noise: tuple[int, int] | None, suppress: Container[int]) -> int:
    if noise is not None:
        digest = crc32(struct.pack("<qq", *noise), digest)
    first = digest % vocab_size
    tokens = ((first + i) % vocab_size for i in range(vocab_size))
    # Where nothing is allowed, a real argmax over −inf finds something too.
    return next((token for token in tokens if token not in suppress), 0)
