"""One pool of connections watched by the views of several cells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from tandem_services.router.decision import MemberProofs, WorkerView


@dataclass(slots=True)
class SharedProofs:
    """`pool` proves membership of the workers of all cells; None: nothing does."""

    pool: MemberProofs | None = None
    _watched: dict[str, tuple[tuple[WorkerView, ...], frozenset[str]]] = field(default_factory=dict)

    def watch(self, cell: str, workers: Iterable[WorkerView], unlisted: frozenset[str]) -> None:
        """The workers of `cell`, instead of those of before."""
        self._watched[cell] = (tuple(workers), unlisted)
        self._pass_on()

    def watch_again(self, cell: str, worker: WorkerView, *, unlisted: bool) -> None:
        """One more of `cell`."""
        workers, unlisted_names = self._watched.get(cell, ((), frozenset()))
        if unlisted:
            unlisted_names |= {worker.incarnation}
        self._watched[cell] = ((*workers, worker), unlisted_names)
        if self.pool is not None:
            self.pool.watch_again(worker, unlisted=unlisted)

    def forget(self, cell: str) -> None:
        """Its workers are watched no more."""
        if self._watched.pop(cell, None) is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        if self.pool is not None:
            workers = chain.from_iterable(views for views, _ in self._watched.values())
            self.pool.watch(workers, unlisted=frozenset().union(*(names for _, names in self._watched.values())))


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
