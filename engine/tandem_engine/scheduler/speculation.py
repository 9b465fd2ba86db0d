"""Drafts for the running requests of a step.

    plan      with a step in flight: `wants` asks whether to settle it first, as retraction does. Drafts
              continue the newest token, so nobody can draft before that is known
    launch    with nothing in flight: `draft` gets proposals, and the pages that they need
    settle    `learn` is told how many were accepted, and adapts the lengths

Requests that take no drafts, because theirs never please or the batch is too large, keep overlapping.

Every rank of an engine drafts the same (T53): n-grams follow from text that all ranks have, networks take rank
0's guesses, and lengths go by the agreed clock and rank 0's step times.

Pages are taken for the drafts of this step and no others, before it is launched (T30, T31): at most what
the request's next tokens would take anyway, so nothing is given back when drafts are rejected. Drafts may
evict cached pages but never make anybody retract; without a page a request takes fewer or none.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tandem_engine.clock import Clock
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.tally import SpeculationTally
from tandem_engine.speculative.interface import DraftRequest, Proposer
from tandem_engine.speculative.lengths import DraftLengths

logger = logging.getLogger(__name__)

Chains: TypeAlias = tuple[tuple[int, ...], ...]


class Candidate(NamedTuple):
    """A running request that may take drafts, and where it stands among the decodes of the step."""

    place: int
    request: DraftRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDrafts:
    """Drafts of one step, in the order of its decodes."""

    chains: Chains = ()
    """() for requests without drafts; () altogether when nobody has any."""
    propose_s: float = 0.0
    broken: bool = False
    """The proposer has raised: these are its last."""


NO_DRAFTS = StepDrafts()


@dataclass(kw_only=True, slots=True)
class Speculation:
    """Asks one proposer on behalf of the loop. Scheduler thread only."""

    proposer: Proposer
    lengths: DraftLengths
    max_batch: int
    """Decodes of a step above which nobody drafts; 0 is no bound."""
    memory: KvMemory
    stopwatch: Clock
    agree: Callable[[StepDrafts], StepDrafts] = lambda drafts: drafts
    """The drafts that every rank uses, and what they cost: those of rank 0. A rank that went by its own could find
    others, or another number of them, and its forward would wait for ever for collectives of another shape (T53)."""
    confined: bool = True
    """A proposal that raises costs drafts alone. False lets it be heard, which tests want."""
    broken: bool = False
    """A proposal has raised; nobody drafts any more."""
    tally: SpeculationTally = field(default_factory=SpeculationTally)

    def wants(self, decodes: Sequence[Request]) -> bool:
        """Whether a step of `decodes` had better wait for the one in flight, to take drafts."""
        return any(self.proposer.ready(candidate.request) for candidate in self._candidates(decodes))

    def draft(self, decodes: Sequence[Request]) -> StepDrafts:
        """Drafts for a step of `decodes` that is about to be launched, with pages. Nothing is in flight."""
        if self.lengths.adaptive and self.lengths.costs.due(len(decodes)):
            return NO_DRAFTS
        candidates = [*self._candidates(decodes)]
        if self.proposer.writes_kv:
            candidates = [candidate for candidate in candidates if self._has_room(candidate.request)]
        if not candidates:
            return NO_DRAFTS
        proposed = self.agree(self._proposed([candidate.request for candidate in candidates]))
        chains: list[tuple[int, ...]] = [()] * len(decodes)
        self.broken = proposed.broken
        for (place, request), chain in zip(candidates, proposed.chains, strict=True):
            chains[place] = self._fitting(request, chain)
        self.tally.propose_s += proposed.propose_s
        return StepDrafts(chains=tuple(chains), propose_s=proposed.propose_s) if any(chains) else NO_DRAFTS

    def learn(self, req: Request, *, drafted: int, accepted: int, batch: int) -> None:
        """A run of `req` was verified in a step of `batch` decodes; its tokens are yet to be appended."""
        self.tally.count(drafted=drafted, accepted=accepted)
        self.lengths.learn(req.acceptance, drafted=drafted, accepted=accepted, seq_len=req.seq_len, batch=batch)

    def measure(self, drafts: StepDrafts, *, batch: int, compute_s: float) -> None:
        """The forward of a step of `batch` decodes and nothing else took so long."""
        if not drafts.chains:
            self.lengths.costs.plain(batch, compute_s=compute_s)
            return
        self.lengths.costs.drafted(
            batch,
            sum(map(len, drafts.chains)),
            propose_s=drafts.propose_s,
            longest=max(map(len, drafts.chains)),
            compute_s=compute_s,
        )

    def released(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """`kv`, with KV of `token_ids`, is about to be given back (T17)."""
        self.proposer.release(kv, token_ids)

    def _candidates(self, decodes: Sequence[Request]) -> Iterator[Candidate]:
        batch = len(decodes)
        if self.broken or 0 < self.max_batch < batch or not self.lengths.open(batch):
            return
        for place, req in enumerate(decodes):
            # The step yields one token without drafts: that one needs no guess.
            limit = min(self.lengths.choose(req.acceptance, seq_len=req.seq_len, batch=batch), req.remaining_tokens - 1)
            if limit > 0:
                yield Candidate(place, _draft_request(req, limit))

    def _has_room(self, request: DraftRequest) -> bool:
        return self.memory.ensure(request.kv, request.seq_len + request.limit)

    def _fitting(self, request: DraftRequest, chain: tuple[int, ...]) -> tuple[int, ...]:
        """The part of `chain` that there are pages for."""
        assert len(chain) <= request.limit, f"{len(chain)} drafts for row {request.kv.row}, limit {request.limit}"
        if chain and not self.memory.ensure(request.kv, request.seq_len + len(chain)):
            return chain[: max(0, request.kv.allocated_len - request.seq_len)]
        return chain

    def _proposed(self, requests: Sequence[DraftRequest]) -> StepDrafts:
        """A chain for each of `requests`."""
        began = self.stopwatch.now()
        try:
            chains = self.proposer.propose(requests).chains
        except Exception:
            if not self.confined:
                raise
            # The boundary of the guesser: requests do not need it.
            logger.exception("%s drafts failed; this engine goes on without drafts", self.proposer.name)
            return StepDrafts(chains=((),) * len(requests), broken=True)
        return StepDrafts(chains=chains, propose_s=self.stopwatch.now() - began)


def _draft_request(req: Request, limit: int) -> DraftRequest:
    return DraftRequest(
        kv=req.held_kv,
        seq_len=req.seq_len,
        token_ids=req.token_ids,
        sampling=req.sampling,
        limit=limit,
    )
