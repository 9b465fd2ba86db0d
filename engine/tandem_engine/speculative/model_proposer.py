"""Drafts from a network: a small model, or a head over the target's hidden states.

One proposal, on the thread that runs forwards
    1. DRAFT_EXTEND  every sequence computes the settled text that it has no draft KV of: the whole prompt at
                     first, afterwards mostly one to three tokens. Its last token yields the first guess
    2. DECODE        the guesses so far yield one more each, until everybody has as many as wanted

A guess goes to the next step where it was made (`FutureMap`), and to the model's step from there (`forward.guesses`):
on a device all steps of a proposal are queued at once, and nobody waits for them. A network samples with the noise of
the target's positions, which makes it agree more often than one that guessed what is likely (see
`speculative.verify`). It is a small model, so every family that can be served can draft, or a head (`eagle`).

Text to be computed is bounded per proposal, in the order of the requests. A prompt longer than that is
caught up with over several steps, without drafts. Of requests that lack the same page of a shared prefix one
computes it and the others wait for the next step, when they find it done.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from tandem_engine.forward.forward_batch import RESOLVE, ForwardBatch
from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.forward.guesses import Guesses
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import PageId
from tandem_engine.speculative.draft_batch import Span, make_batch
from tandem_engine.speculative.draft_history import DraftHistory, DraftSequence
from tandem_engine.speculative.interface import DraftRequest, DraftTokens

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
        """How long chains get does not depend on what is guessed, so nobody need know a guess before the last one."""
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
