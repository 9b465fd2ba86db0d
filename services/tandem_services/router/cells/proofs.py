"""One pool of connections watched by the views of several cells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from tandem_services.router.decision import MemberProofs, WorkerView


@dataclass(slots=True)
class _Watched:
    workers: dict[str, WorkerView] = field(default_factory=dict)
    """By incarnation."""
    unlisted: set[str] = field(default_factory=set)


@dataclass(slots=True)
class SharedProofs:
    """`pool` proves membership of the workers of all cells; None: nothing does."""

    pool: MemberProofs | None = None
    _watched: dict[str, _Watched] = field(default_factory=dict)
    """By cell."""

    def watch(self, cell: str, workers: Iterable[WorkerView], unlisted: frozenset[str]) -> None:
        """The workers of `cell`, instead of those of before."""
        self._watched[cell] = _Watched({worker.incarnation: worker for worker in workers}, set(unlisted))
        self._pass_on()

    def watch_again(self, cell: str, worker: WorkerView, *, unlisted: bool) -> None:
        """One more of `cell`."""
        watched = self._watched.setdefault(cell, _Watched())
        watched.workers[worker.incarnation] = worker
        if unlisted:
            watched.unlisted.add(worker.incarnation)
        if self.pool is not None:
            self.pool.watch_again(worker, unlisted=unlisted)

    def forget(self, cell: str) -> None:
        """Its workers are watched no more."""
        if self._watched.pop(cell, None) is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        if self.pool is not None:
            every = self._watched.values()
            workers = chain.from_iterable(watched.workers.values() for watched in every)
            self.pool.watch(workers, unlisted=frozenset().union(*(watched.unlisted for watched in every)))


@dataclass(frozen=True, slots=True)
class CellProofs:
    """`MemberProofs` of one cell."""

    shared: SharedProofs
    pool: MemberProofs
    cell: str

    def watch(self, workers: Iterable[WorkerView], *, unlisted: frozenset[str]) -> None:
        self.shared.watch(self.cell, workers, unlisted)

    def watch_again(self, worker: WorkerView, *, unlisted: bool) -> None:
        self.shared.watch_again(self.cell, worker, unlisted=unlisted)

    @property
    def silent(self) -> frozenset[str]:
        return self.pool.silent

    def proven(self, incarnation: str) -> bool:
        return self.pool.proven(incarnation)

    def proven_now(self, incarnation: str) -> bool:
        return self.pool.proven_now(incarnation)

    async def prove(self, worker: WorkerView, *, within_s: float) -> bool:
        return await self.pool.prove(worker, within_s=within_s)
