"""Who of all that a lost worker had in hand is to blame for it.

    free         a request that no worker was lost with, or that has proved itself since
    suspected    a worker was lost before the request had proved itself there: it goes on at once, like all others
    on trial     a second one was lost, and others were on the first: it goes on when no other trial is under way
    convicted    two workers were lost, and no other unproven request was on the first of them; or three

A worker dies with many requests in hand, and most of them are innocent. What kills a worker does it again, and soon:
while its prompt or its next tokens are computed. So a request proves itself on a worker by `PROOF_TOKENS` new tokens,
and a loss after that clears it. A worker counts only when it is known to have taken the request in: when two die at
once, nobody who was just sent to the second is blamed for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

PROOF_TOKENS = 4
"""New tokens on one worker that prove a request harmless there."""

CONVICTING_LOSSES = 2
CERTAIN_LOSSES = 3
"""Whoever else was there."""

TRIAL_S = 5.0
"""A trial that takes longer, because its worker is busy, holds up no other."""

MAX_WORKERS = 256
"""Workers of which suspects are remembered. One that is gone is never asked for again."""


@dataclass(kw_only=True, slots=True)
class Suspicion:
    """Workers that were lost with one choice in hand, since it last proved itself."""

    lost: set[str] = field(default_factory=set)
    with_others: bool = False
    """For the first of them other requests were possible causes too."""

    def note_loss(self, incarnation: str, *, gained: int, alone: bool) -> None:
        """`gained`: tokens that the lost worker had brought. `alone`: no other unproven request was there."""
        if gained >= PROOF_TOKENS:
            self.proved()
            return
        if not self.lost:
            self.with_others = not alone
        self.lost.add(incarnation)

    def proved(self) -> None:
        """It has got through where workers were lost."""
        self.lost.clear()
        self.with_others = False

    def acquit(self, living: Iterable[str]) -> None:
        """Workers that were lost and are there again did not die: it was the network."""
        self.lost.difference_update(living)
        if not self.lost:
            self.with_others = False

    @property
    def convicted(self) -> bool:
        return len(self.lost) >= (CERTAIN_LOSSES if self.with_others else CONVICTING_LOSSES)

    @property
    def needs_trial(self) -> bool:
        return len(self.lost) >= CONVICTING_LOSSES


@dataclass(kw_only=True, slots=True)
class Suspects:
    """Requests that are on workers and have not proved themselves there. One per model service."""

    _unproven: OrderedDict[str, set[str]] = field(default_factory=OrderedDict)
    """Names of attempts by incarnation. Those of a lost worker stay, to be counted by each of them."""
    _court: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self, suspicion: Suspicion, rid: str, workers: Iterable[str]) -> "Trial":
        """Before attempt `rid` is sent to `workers`. Who is on trial waits for its turn."""
        trial = Trial(suspects=self, rid=rid, workers=tuple(workers))
        if suspicion.needs_trial:
            await self._court.acquire()
            trial.in_court(self._court)
        for worker in trial.workers:
            self._unproven.setdefault(worker, set()).add(rid)
        while len(self._unproven) > MAX_WORKERS:
            self._unproven.popitem(last=False)
        return trial

    def alone(self, worker: str) -> bool:
        """Whether at most one unproven request was on `worker`."""
        return len(self._unproven.get(worker, ())) <= 1

    def leave(self, rid: str, workers: Iterable[str]) -> None:
        for worker in workers:
            attempts = self._unproven.get(worker, set())
            attempts.discard(rid)
            if not attempts:
                self._unproven.pop(worker, None)


@dataclass(kw_only=True, slots=True)
class Trial:
    """A request on its way to prove itself."""

    suspects: Suspects
    rid: str
    workers: tuple[str, ...]
    _court: asyncio.Lock | None = None
    _limit: asyncio.TimerHandle | None = None

    def in_court(self, court: asyncio.Lock) -> None:
        """It has the court to itself, for a while."""
        self._court = court
        self._limit = asyncio.get_running_loop().call_later(TRIAL_S, self._rise)

    def cleared(self) -> None:
        """It has proved itself, or ended in some other way than with its worker. Idempotent."""
        self.suspects.leave(self.rid, self.workers)
        self._rise()

    def lost(self, worker: str) -> None:
        """`worker` died; if it had another one, that one lives."""
        self.suspects.leave(self.rid, (other for other in self.workers if other != worker))
        self._rise()

    def _rise(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if self._court is not None:
            self._court.release()
        self._court = self._limit = None
