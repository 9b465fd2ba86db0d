"""Drafts for the running requests of a step.

    plan             with a step in flight: `wants` returns whether to settle it first, as retraction does. Drafts
                     continue the newest token, so it must be known
    launch           with no step in flight: `draft` gets proposals, and the pages that they need
    settle           `learn` receives how many were accepted, `settled` the kind of step, and lengths adapt
    next iteration   `begin_turn` receives the time of all of it

Requests without drafts, because theirs do not pay or the batch is too large, keep overlapping.

Every rank of an engine drafts the same tokens [rank-zero-drafts]: n-grams follow from text that all ranks have, drafts
of networks are those of rank 0, and lengths follow the clock that ranks agree on and rank 0's time for proposals.

Pages are taken for the drafts of this step only, before it is launched [draft-pages]. They are at most those of the
request's next tokens, so rejected drafts release none. Drafts may evict cached pages but never cause a retraction;
without a page a request takes fewer drafts or none.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import RequestId
from tandem_engine.forward.batch import Chains, Guesses
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.counters import SpeculationTally
from tandem_engine.scheduler.request import Request
from tandem_engine.speculative.adaptive_length import DraftLengths, Seeker, Settled, TurnTimer
from tandem_engine.speculative.interface import DraftRequest, Proposer

logger = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A running request that could take drafts, and where it stands among the decodes of the step."""

    place: int
    req: Request
    request: DraftRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDrafts:
    """Drafts of one step, in the order of its decodes."""

    chains: Chains = ()
    """() for requests without drafts; () altogether when no request has any."""
    guesses: Guesses | None = None
    """Where the tokens are, if only the device has them: then `chains` are indices among these."""
    propose_s: float = 0.0
    """That the scheduler spent on them."""
    broken: bool = False
    """The proposer has raised: these are its last."""

    def known(self) -> "StepDrafts":
        """The same with tokens. Waits for guesses of a device."""
        return self if self.guesses is None else replace(self, chains=self.guesses.chains(self.chains), guesses=None)

    def queued_s(self) -> float:
        """Seconds that a device took for them besides. Waits for it."""
        return 0.0 if self.guesses is None else self.guesses.compute_s


NO_DRAFTS = StepDrafts()


@dataclass(kw_only=True, slots=True)
class Speculation:
    """Calls one proposer on behalf of the loop. Scheduler thread only."""

    proposer: Proposer
    lengths: DraftLengths
    max_batch: int
    """Decodes of a step above which none drafts; 0 is no bound."""
    memory: KvMemory
    stopwatch: Clock
    """Times proposals."""
    timer: TurnTimer
    agree: Callable[[StepDrafts], StepDrafts] = lambda drafts: drafts
    """The drafts that every rank uses, and what they cost: those of rank 0. A rank that went by its own could find
    others, or another number of them, and its forward would wait forever for collectives of another shape
    [rank-zero-drafts]."""
    lockstep: bool = False
    """Drafts are read at once: they are sent to other ranks."""
    confined: bool = True
    """A proposal that raises costs only drafts. False re-raises its error, for tests."""
    broken: bool = False
    """A proposal has raised; drafting is off."""
    awaited: tuple[Request, ...] = ()
    """Those for whose drafts the next step waits."""
    tally: SpeculationTally = field(default_factory=SpeculationTally)

    def begin_turn(self) -> None:
        """A turn of the loop begins: what the one before took is known."""
        timed = self.timer.begin_turn()
        if timed is None:
            return
        batch, drafts, _ = timed.step
        if drafts:
            self.lengths.costs.drafted(batch, drafts, timed.seconds)
        else:
            self.lengths.costs.plain(batch, timed.seconds)

    def wants(self, decodes: Sequence[Request]) -> bool:
        """Whether a step of `decodes` had better wait for the one in flight, to take drafts."""
        self.awaited = tuple(candidate.req for candidate in self._candidates(decodes))
        return bool(self.awaited)

    def draft(self, decodes: Sequence[Request]) -> StepDrafts:
        """Drafts for a step of `decodes` that is about to be launched, with pages. Nothing is in flight."""
        candidates = self._candidates(decodes)
        if self.proposer.writes_kv:
            candidates = [candidate for candidate in candidates if self._has_room(candidate.request)]
        proposed = NO_DRAFTS
        if candidates:
            proposed = self.agree(self._proposed([candidate.request for candidate in candidates]))
        chains: list[tuple[int, ...]] = [()] * len(decodes)
        self.broken = self.broken or proposed.broken
        for (place, _, request), chain in zip(candidates, proposed.chains, strict=True):
            chains[place] = self._fitting(request, chain)
        drafting = {decodes[place].rid for place, chain in enumerate(chains) if chain}
        self._close(proposed, drafting=drafting, batch=len(decodes))
        return replace(proposed, chains=tuple(chains)) if drafting else NO_DRAFTS

    def learn(self, req: Request, *, drafted: int, accepted: int) -> None:
        """A run of `req` was verified; its tokens are yet to be appended."""
        self.tally.count(drafted=drafted, accepted=accepted)
        self.lengths.learn(req.acceptance, drafted=drafted, accepted=accepted, seq_len=req.seq_len)

    def verified(self, drafts: StepDrafts) -> None:
        """A step with these is over."""
        self.tally.propose_s += drafts.queued_s()

    def settled(self, drafts: StepDrafts, *, batch: int) -> None:
        """A step of `batch` decodes and nothing else is over."""
        count = sum(map(len, drafts.chains))
        self.timer.settled(Settled(batch=batch, drafts=count, propose_s=drafts.propose_s))
        self.lengths.settled(batch=batch, drafted=count > 0)

    def released(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """`kv`, with KV of `token_ids`, is about to be given back [row-state-forgotten]."""
        self.proposer.release(kv, token_ids)

    def _close(self, proposed: StepDrafts, *, drafting: set[RequestId], batch: int) -> None:
        """Account for a proposal. An empty one for a request that waited for it counts as a rejected draft."""
        if not proposed.chains and not self.awaited:
            return
        self.timer.count_proposal(proposed.propose_s)
        self.tally.propose_s += proposed.propose_s
        if not drafting:
            self.lengths.count_without_drafts(batch=batch)
        for req in self.awaited:
            if req.finished is None and req.rid not in drafting:
                self.lengths.learn(req.acceptance, drafted=1, accepted=0, seq_len=req.seq_len)
        self.awaited = ()

    def _candidates(self, decodes: Sequence[Request]) -> list[Candidate]:
        """Requests that are likely to have drafts which are worth it."""
        batch = len(decodes)
        if batch == 0 or self.broken or 0 < self.max_batch < batch:
            return []
        if not self.lengths.open((req.acceptance for req in decodes), batch=batch):
            return []
        able = [*self._able(decodes)]
        seekers = [Seeker(req.acceptance, req.seq_len, request.limit) for _, req, request in able]
        lengths = self.lengths.choose(seekers, batch=batch)
        return [
            candidate._replace(request=replace(candidate.request, limit=length))
            for candidate, length in zip(able, lengths, strict=True)
            if length
        ]

    def _able(self, decodes: Sequence[Request]) -> Iterator[Candidate]:
        for place, req in enumerate(decodes):
            # The step yields one token without drafts: that one needs no guess.
            limit = min(self.lengths.longest, req.remaining_tokens - 1, self._up_to_anchor(req))
            if limit <= 0:
                continue
            request = _draft_request(req, limit)
            if self.proposer.ready(request):
                yield Candidate(place, req, request)

    def _up_to_anchor(self, req: Request) -> int:
        """Drafts of a run that passes no length at which its state may be copied: steps begin there."""
        if self.memory.anchors is None:
            return self.lengths.longest
        grain = self.memory.anchors.grain
        return grain - (req.seq_len - 1) % grain - 1

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
            drafts = self.proposer.propose(requests)
            proposed = StepDrafts(chains=drafts.chains, guesses=drafts.guesses)
            if self.lockstep:
                proposed = proposed.known()
        except Exception:
            if not self.confined:
                raise
            # The boundary of the guesser: requests do not need it.
            logger.exception("%s drafts failed; continuing without drafts", self.proposer.name)
            return StepDrafts(chains=((),) * len(requests), broken=True)
        return replace(proposed, propose_s=self.stopwatch.now() - began)


def _draft_request(req: Request, limit: int) -> DraftRequest:
    return DraftRequest(
        kv=req.held_kv,
        seq_len=req.seq_len,
        token_ids=req.token_ids,
        sampling=req.sampling,
        limit=limit,
    )
