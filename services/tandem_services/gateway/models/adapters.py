"""Which adapter a name stands for, according to what is registered and to the workers of one model.

A name that a command to a gateway has registered stands for that, whatever workers have. For names of workers' flags:
workers may have different adapters under one name, for example while a new version is rolled out. A name stands for the
one that most workers have; of equal numbers, for the one of the newest worker. Workers that take no new requests, such
as those of a revision that is being tested, count only where no other worker has the name, and so do prefill workers
where no worker that generates has the same adapter. All gateways with the same view of the fleet resolve it alike, and
a request keeps the adapter that its name stood for when it was planned.
"""

from collections.abc import Collection, Iterable, Mapping
from operator import itemgetter

import msgspec

from tandem_engine.config import Role
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.messages.requests import AdapterRef
from tandem_services.router.decision import WorkerView
from tandem_services.router.registered_adapters import RegisteredAdapter


class HeldAdapter(msgspec.Struct, kw_only=True):
    """One content of one name, for administrators; an entry of `GET /v1/adapters`."""

    id: str
    """MODEL:NAME@DIGEST"""
    model: str
    name: str
    digest: str
    rank: int
    root: str
    requested: bool
    """The name stands for it."""
    registered: bool
    """A command to a gateway has registered the name."""
    source: str
    """Folder of the registered name, in the workers' --lora-dir; "" of other content."""
    workers: list[str]
    """Ids of those that have it in memory, in order; an entry of a list names the first of them."""
    num_workers: int
    """All of them."""
    failed: dict[str, str]
    """Why workers, by id, could not load it for a request not long ago; an entry of a list names the first of them."""
    num_failed: int
    """All of them."""

    @property
    def place(self) -> tuple[str, str, str]:
        """In the list of all."""
        return self.model, self.name, self.digest


class AdapterNames:
    """Of one view of the fleet. `offered`: incarnations that take new requests."""

    def __init__(
        self,
        workers: Iterable[WorkerView],
        *,
        offered: Collection[str],
        registered: Mapping[str, RegisteredAdapter] | None = None,
        former: Mapping[str, ServedAdapter] | None = None,
    ) -> None:
        """`former`: what names stood for at workers that are gone."""
        self._all = tuple(workers)
        self._workers = [worker for worker in self._all if worker.adapters]
        self._offered = offered
        self._registered = registered or {}
        self._former = former or {}
        self._tallies: tuple[_Tally, ...] | None = None

    def find(self, name: str) -> ServedAdapter | None:
        """None where neither is one of this name registered nor has, or had, a worker one."""
        if name in self._registered:
            return self._registered[name]
        votes: dict[str, _Vote] = {}
        for tally in self._tally():
            adapter = tally.adapters.get(name)
            if adapter is not None:
                votes.setdefault(adapter.digest, _Vote(adapter)).add(tally)
        return max(votes.values(), key=_Vote.weight).adapter if votes else self._former.get(name)

    def all(self) -> dict[str, ServedAdapter]:
        """By name."""
        names = {name for tally in self._tally() for name in tally.adapters}
        names |= self._registered.keys() | self._former.keys()
        found = ((name, self.find(name)) for name in names)
        return {name: adapter for name, adapter in found if adapter is not None}

    def held(self, model: str) -> list[HeldAdapter]:
        """What each worker has, by name and digest; `model` is theirs."""
        current = self.all()
        sources = [*(tally.adapters for tally in self._tally()), self._former, self._registered]
        named = {(each.name, each.digest): each for source in sources for each in source.values()}
        holders, failures = self._holders(), self._failures()
        held = []
        for (name, digest), adapter in sorted(named.items(), key=itemgetter(0)):
            workers, failed = sorted(holders.get(digest, ())), failures.get(digest, {})
            held.append(
                HeldAdapter(
                    id=f"{model}:{name}@{digest}",
                    model=model,
                    name=name,
                    digest=digest,
                    rank=adapter.rank,
                    root=adapter.root,
                    requested=current[name].digest == digest,
                    registered=name in self._registered,
                    source=self._source_of(adapter),
                    workers=workers,
                    num_workers=len(workers),
                    failed=failed,
                    num_failed=len(failed),
                )
            )
        return held

    def _tally(self) -> "tuple[_Tally, ...]":
        """Most workers of a fleet have the same adapters, by the same object: no name has to look at each of them."""
        if self._tallies is None:
            found: dict[int, _Tally] = {}
            for worker in self._workers:
                tally = found.setdefault(id(worker.adapters), _Tally(worker.adapters))
                tally.count(worker, offered=worker.incarnation in self._offered)
            self._tallies = tuple(found.values())
        return self._tallies

    def _holders(self) -> dict[str, list[str]]:
        """Ids of the workers that have an adapter in memory, by its digest."""
        holders: dict[str, list[str]] = {}
        for worker in self._all:
            for digest in worker.held_adapters:
                holders.setdefault(digest, []).append(worker.worker_id)
        return holders

    def _failures(self) -> dict[str, dict[str, str]]:
        """Reasons by worker, by the digest of the adapter."""
        failures: dict[str, dict[str, str]] = {}
        for worker in self._all:
            for failure in () if worker.adapter_memory is None else worker.adapter_memory.failed:
                failures.setdefault(failure.digest, {})[worker.worker_id] = failure.reason
        return failures

    def _source_of(self, adapter: ServedAdapter) -> str:
        entry = self._registered.get(adapter.name)
        return entry.source if entry is not None and entry.digest == adapter.digest else ""


class _Tally:
    """Workers that have the same adapters."""

    def __init__(self, adapters: Mapping[str, ServedAdapter]) -> None:
        self.adapters = adapters
        self.generates = False
        self.offered = 0
        self.workers = 0
        self.newest = (0, "")

    def count(self, worker: WorkerView, *, offered: bool) -> None:
        number = worker.incarnation.rpartition("@")[2]
        self.generates = self.generates or (offered and worker.role is not Role.PREFILL)
        self.offered += offered
        self.workers += 1
        self.newest = max(self.newest, (len(number), number))


class _Vote:
    """For one content of a name."""

    def __init__(self, adapter: ServedAdapter) -> None:
        self.adapter = adapter
        self._generates = False
        self._offered = 0
        self._workers = 0
        self._newest = (0, "")

    def add(self, tally: _Tally) -> None:
        self._generates = self._generates or tally.generates
        self._offered += tally.offered
        self._workers += tally.workers
        self._newest = max(self._newest, tally.newest)

    def weight(self) -> tuple[bool, int, int, tuple[int, str], str]:
        return self._generates, self._offered, self._workers, self._newest, self.adapter.digest


def ref_of(adapter: ServedAdapter) -> AdapterRef:
    """What requests carry of it."""
    source = adapter.source if isinstance(adapter, RegisteredAdapter) else ""
    return AdapterRef(name=adapter.name, digest=bytes.fromhex(adapter.digest), source=source, size=adapter.size)
