"""What the absence of an adapter costs at each worker, in seconds.

    load_s    bytes of the adapter × seconds per byte, as the worker has measured its loads, and `COMMAND_S`
    evict_s   where its memory for adapters is full: the same for an adapter of mean size, which will be needed again

A worker that has just been given a request of the adapter loads it, but reports that only with its next heartbeat.
Until then it counts as one that will have it at the predicted time, or requests of one burst would load the adapter on
all workers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_services.router.decision import Absence, RouteDecision, RouteQuery, WorkerView

COMMAND_S = 0.005
"""Of a load, whatever its size: opening files, and a turn of the scheduler."""

ASSUMED_BYTE_S = 4e-9
"""Of a worker that has loaded nothing yet: a disk of 250 MB/s."""

ASSUMED_SIZE = 64 << 20
"""Bytes of an adapter of unknown size: rank 16 on a model of 8 billion parameters, and less than that."""

REPORTED_S = 2.0
"""A load is known from the worker's own report within this time after its end."""

MAX_COMING = 4096


class _Coming(NamedTuple):
    ready_at: float
    until: float


@dataclass(kw_only=True, slots=True)
class AdapterPrices:
    """Of one router. Belongs to its event loop."""

    clock: Clock
    _coming: dict[tuple[str, bytes], _Coming] = field(default_factory=dict)
    """By incarnation and digest."""

    def absences(self, query: RouteQuery, workers: Iterable[WorkerView]) -> Mapping[str, Absence]:
        """By incarnation, of those of `workers` that would have to load the adapter of `query`."""
        if not query.adapter:
            return {}
        absent = (each for each in workers if not each.has_adapter(query.adapter))
        return {worker.incarnation: self._absence(query, worker) for worker in absent}

    def note(self, decision: RouteDecision, query: RouteQuery) -> None:
        """The workers of `decision` are about to get the request."""
        now = self.clock.now()
        for worker in (decision.decode, decision.prefill):
            key = (worker.incarnation, query.adapter) if worker is not None else None
            absence = None if key is None else query.absences.get(key[0])
            if key is None or absence is None or self._is_coming(key, now):
                continue
            while len(self._coming) >= MAX_COMING:
                del self._coming[next(iter(self._coming))]
            self._coming[key] = _Coming(now + absence.load_s, now + 2 * absence.load_s + REPORTED_S)

    def _absence(self, query: RouteQuery, worker: WorkerView) -> Absence:
        now, key = self.clock.now(), (worker.incarnation, query.adapter)
        if self._is_coming(key, now):
            return Absence(max(0.0, self._coming[key].ready_at - now), 0.0)
        memory = worker.adapter_memory
        byte_s = (memory.byte_s if memory is not None else 0.0) or ASSUMED_BYTE_S
        full = memory is not None and len(memory.resident) >= memory.limit
        evicted = (memory.mean_size or ASSUMED_SIZE) if memory is not None and full else 0
        load_s = COMMAND_S + (query.adapter_size or ASSUMED_SIZE) * byte_s
        return Absence(load_s, COMMAND_S + evicted * byte_s if full else 0.0)

    def _is_coming(self, key: tuple[str, bytes], now: float) -> bool:
        coming = self._coming.get(key)
        if coming is not None and now >= coming.until:
            del self._coming[key]
            return False
        return coming is not None
