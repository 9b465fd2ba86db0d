"""Drafts from a network: a small model, or a head over the target's hidden states.

One proposal, on the thread that runs forwards
    1. DRAFT_EXTEND  every sequence computes the completed text that it has no draft KV of: the whole prompt at first,
                     afterwards mostly one to three tokens. Its last token yields the first draft
    2. DECODE        each step yields one more draft per sequence, until all have as many as required

A draft goes to the next step where it was made (`FutureMap`), and to the model's step from there (`forward.batch`): on
a device all steps of a proposal are queued at once, and nothing waits for them. A network samples with the noise of the
target's positions, so it agrees more often than one that drafts the likeliest token (see `speculative.verify`). It is a
small model, so every family that can be served can draft, or a head (`eagle`).

Text to be computed is bounded per proposal, in the order of the requests. A longer prompt is computed over several
steps, without drafts. Of requests that lack the same page of a shared prefix one computes it, and the others wait for
the next step.

Batches of a draft network are `ForwardBatch`es over pages of the target's requests. Its pool has as many pages of the
same size as the target's, so page i of a request is page i in both, and one row of the page table serves both. A
network that sees only a window reads a row from the window's first page on: for attention the sequence starts there,
while positions, which rotary embeddings need, are those of the whole text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.base.names import PageId
from tandem_engine.forward.batch import RESOLVE, ForwardBatch, ForwardMode, Guesses, SamplingBatch
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.draft_history import DraftHistory, DraftSequence
from tandem_engine.speculative.interface import DraftRequest, DraftTokens

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens [start, start + len(token_ids)) of one request, to be computed by the draft model."""

    kv: RequestKv
    window: int
    """First token that the draft model sees, a multiple of the page size."""
    start: int
    token_ids: Sequence[int]
    samples: bool
    sampling: SamplingParams

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def make_batch(spans: Sequence[Span], *, page_size: int, mode: ForwardMode) -> ForwardBatch:
    """`spans` as one step in which those that sample draw the token after their last one."""
    lens = [len(span.token_ids) for span in spans]
    table = _page_table(spans, page_size)
    positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in spans])
    in_window = positions - np.repeat(_ints([span.window for span in spans]), lens)
    pages = table[np.repeat(np.arange(len(spans)), lens), in_window // page_size].astype(np.int64)
    sampling = [span for span in spans if span.samples]
    return ForwardBatch(
        step=0,
        mode=mode,
        input_ids=_tensor([token for span in spans for token in span.token_ids]),
        positions=torch.from_numpy(positions),
        out_cache_loc=torch.from_numpy(pages * page_size + in_window % page_size),
        rows=_tensor([span.kv.row for span in spans]),
        seq_lens=_tensor([span.stop - span.window for span in spans]),
        extend_lens=_tensor(lens),
        page_table=torch.from_numpy(table),
        num_extend=len(spans) if mode is ForwardMode.DRAFT_EXTEND else 0,
        sample_index=_tensor([index for index, span in enumerate(spans) if span.samples]),
        sampling=_coupled(sampling),
    )


def _page_table(spans: Sequence[Span], page_size: int) -> npt.NDArray[np.int32]:
    """[spans, pages of the longest] int32; 0, the dummy page, after a sequence's last page."""
    parts = [span.kv.pages[span.window // page_size : -(-span.stop // page_size)] for span in spans]
    table = np.zeros((len(spans), max(map(len, parts))), dtype=np.int32)
    for row, pages in enumerate(parts):
        table[row, : len(pages)] = pages
    return table


def _coupled(spans: Sequence[Span]) -> SamplingBatch:
    """Sampling with the noise that the target will have at the same positions (see `speculative.verify`).

    Penalties, biases and grammars are left to the target: a draft that breaks them is rejected.
    """
    params = [span.sampling for span in spans]
    return SamplingBatch(
        temperature=torch.tensor([0.0 if p.greedy else p.temperature for p in params], dtype=torch.float32),
        top_k=_tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seed=_tensor([p.seed for p in params]),
        position=_tensor([span.stop for span in spans]),
        all_greedy=all(p.greedy for p in params),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _tensor(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


Proposal: TypeAlias = tuple[list[tuple[int, ...]], Guesses]
"""Indices of each chain among the guesses."""

OnForwardThread: TypeAlias = Callable[[Callable[[], Proposal]], Proposal]
"""Runs a function where forwards run, after those that were launched, and waits for it."""

DraftNetwork: TypeAlias = Callable[[Sequence[ForwardBatch]], Guesses]
"""Computes batches on a pool of its own, one behind the other: `Runner.guess`. A `RESOLVE` id is what it guessed
last for the same row. Called where forwards run, under `torch.inference_mode`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request's part in a proposal."""

    place: int
    """Among the requests of the proposal."""
    request: DraftRequest
    sequence: DraftSequence
    stop: int
    """Its text is computed up to here; drafts need all of it."""

    @property
    def drafts(self) -> bool:
        return self.stop == self.request.seq_len

    def text(self) -> Span:
        """What it has no draft KV of."""
        start = self.sequence.covered
        return self._span(start, self.request.token_ids(start, self.stop), samples=self.drafts)

    def guess(self, guesses: int) -> Span:
        """The newest of so many guesses, which is not known yet."""
        return self._span(self.stop + guesses - 1, (RESOLVE,), samples=True)

    def _span(self, start: int, token_ids: Sequence[int], *, samples: bool) -> Span:
        return Span(
            kv=self.request.kv,
            window=self.sequence.window,
            start=start,
            token_ids=token_ids,
            samples=samples,
            sampling=self.request.sampling,
        )


@dataclass(kw_only=True, slots=True)
class ModelProposer:
    """Implements `Proposer` around a network."""

    name: str
    network: DraftNetwork
    history: DraftHistory
    run: OnForwardThread
    page_size: int
    positions: int
    """The network can place tokens at [0, positions)."""
    max_text: int
    """Tokens of settled text that one proposal computes at most."""
    writes_kv: bool = True

    def ready(self, request: DraftRequest) -> bool:
        """Always, but beyond the network's positions: it has a guess for any text."""
        return request.seq_len < self.positions

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        """See `Proposer.propose`; () for requests whose text is not caught up with yet."""
        proposed: list[tuple[int, ...]] = [()] * len(requests)
        jobs = [*self._jobs(requests)]
        if not jobs:
            return DraftTokens(tuple(proposed))
        drafting = [job for job in jobs if job.drafts]
        chains, guesses = self.run(lambda: self._compute(jobs, drafting))
        for job in jobs:
            job.sequence.covered = job.stop
        for job, chain in zip(drafting, chains, strict=True):
            proposed[job.place] = chain
            # The last guess was not computed: nothing was asked after it.
            self.history.caught_up(job.sequence, job.request, partial(_tokens, guesses, chain[:-1]))
        indices = tuple(proposed)
        return DraftTokens(guesses.chains(indices)) if guesses.on_device is None else DraftTokens(indices, guesses)

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """See `Proposer.release`."""
        self.history.release(kv, token_ids)

    def _jobs(self, requests: Sequence[DraftRequest]) -> Iterator[Job]:
        text_left = self.max_text
        written: set[PageId] = set()
        for place, request in enumerate(requests):
            if request.seq_len >= self.positions or text_left == 0:
                continue
            sequence = self.history.of(request)
            if sequence.covered >= request.seq_len:
                continue
            stop = min(request.seq_len, sequence.covered + text_left)
            pages = request.kv.pages[sequence.covered // self.page_size : -(-stop // self.page_size)]
            if not written.isdisjoint(pages):
                sequence.look_again()
                continue
            written.update(pages)
            text_left -= stop - sequence.covered
            yield Job(place, request, sequence, stop)

    @torch.inference_mode()
    def _compute(self, jobs: Sequence[Job], drafting: Sequence[Job]) -> Proposal:
        """The length of chains does not depend on the guesses, so the host need not know one before the last."""
        batches = [self._batch([job.text() for job in jobs], ForwardMode.DRAFT_EXTEND)]
        guessing = [[*range(len(drafting))]]
        while more := [index for index in guessing[-1] if self._wants_more(drafting[index], len(batches))]:
            spans = [drafting[index].guess(len(batches)) for index in more]
            batches.append(self._batch(spans, ForwardMode.DECODE))
            guessing.append(more)
        chains: list[list[int]] = [[] for _ in drafting]
        for place, index in enumerate(index for indices in guessing for index in indices):
            chains[index].append(place)
        guesses, asked = self.network(batches), sum(map(len, guessing))
        assert guesses.count == asked, f"a network made {guesses.count} drafts where {asked} were requested"
        return [tuple(each) for each in chains], guesses

    def _wants_more(self, job: Job, guesses: int) -> bool:
        return guesses < job.request.limit and job.stop + guesses <= self.positions

    def _batch(self, spans: Sequence[Span], mode: ForwardMode) -> ForwardBatch:
        return make_batch(spans, page_size=self.page_size, mode=mode)


def _tokens(guesses: Guesses, indices: Sequence[int]) -> Sequence[int]:
    (tokens,) = guesses.chains((tuple(indices),))
    return tokens
