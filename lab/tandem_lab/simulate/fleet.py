"""Simulated workers as the router sees them: heartbeats and prefix index through the product's own registry code.

heartbeat     each second; in a run of more than `ALL_BEAT` workers when a worker's load has changed, and every
              `BEAT_AGAIN_S`, as Redis has nothing to learn from the others
index         what a cache has stored and removed, at most every `PACE_S`, revision by revision
join, leave   a worker registers with an empty cache; one that leaves is not routable any more, finishes its
              requests, and deregisters
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import Role
from tandem_lab.simulate.clock import SimulatedRedis
from tandem_lab.simulate.prefix_fetch import ServiceTimes
from tandem_lab.simulate.worker import ModelledWorker
from tandem_services.router.cost import Load
from tandem_services.router.decision import WorkerView
from tandem_services.router.index import Applied, IndexUpdate, UpdateKind
from tandem_services.router.keys import HEARTBEAT_S, MAX_WORKERS
from tandem_services.router.registry import WorkerRecord, WorkerState

MODEL = "simulated"

PACE_S = 0.05
"""As `tandem_services.worker.index_publisher.PACE_S`."""

ALL_BEAT = 1024

BEAT_AGAIN_S = 10.0

AT_ONCE = 16
"""Heartbeats, each on a separate connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetShape:
    """How many workers of each role, and what each is like."""

    both: int = 0
    prefill: int = 0
    decode: int = 0
    cache_blocks: int
    """Of each worker."""
    block_tokens: int
    max_sequences: int = 256
    context_length: int = 131_072
    times: ServiceTimes = field(default_factory=ServiceTimes)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_WORKERS:
            raise ConfigError(f"--workers: there must be 1 to {MAX_WORKERS} workers, got {self.size}")
        if self.both + self.decode == 0:
            raise ConfigError(
                "--workers: at least one worker must decode, e.g. --workers 8 or --workers prefill=4,decode=4"
            )
        if self.both == 0 and (self.prefill == 0) != (self.decode == 0):
            raise ConfigError("--workers: decode workers need prefill workers, e.g. --workers prefill=4,decode=4")
        if self.cache_blocks < 1:
            raise ConfigError("--cache-blocks: each worker must have at least one block")

    @property
    def size(self) -> int:
        return self.both + self.prefill + self.decode

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a worker takes: no longer than its pool, as an engine has it."""
        return min(self.context_length, self.cache_blocks * self.block_tokens)

    @property
    def computing(self) -> int:
        """Workers whose caches save computing: decode workers cache what was computed elsewhere."""
        return self.both + self.prefill

    def counts(self) -> dict[Role, int]:
        return {Role.BOTH: self.both, Role.PREFILL: self.prefill, Role.DECODE: self.decode}


class Fleet:
    """All workers of one run. `begin` registers them."""

    def __init__(self, shape: FleetShape, redis: SimulatedRedis, *, cell: str = "", others: int = 0) -> None:
        """`cell`: begins the names of its workers. `others`: workers of the run that are in other cells."""
        self.redis = redis
        self._others = others
        self._cell = cell
        self._shape = shape
        self._revision: dict[str, int] = {}
        self._publishing: set[str] = set()
        self._leaving: set[str] = set()
        self._joined: Counter[Role] = Counter()
        self._beaten: dict[str, tuple[float, Load]] = {}
        """When each worker's last heartbeat was, and what it reported."""
        self._generation = 0
        """Generation of the fleet in Redis: a heartbeat with the current one does not get all members again."""
        self.workers: dict[str, ModelledWorker] = {}
        """Those that are registered, by incarnation."""
        self.all_workers: list[ModelledWorker] = []
        """All there ever were."""
        self.closing = False
        """No heartbeats any more."""

    async def begin(self) -> None:
        """Registers all workers with an empty cache. Raises `RedisUnavailableError`."""
        await self.redis.begin()
        await self.redis.follow()
        for role, count in self._shape.counts().items():
            for _ in range(count):
                await self.join(role)
        self.redis.events.after(HEARTBEAT_S, self._beat)

    def of_gateway(self, number: int) -> "Fleet":
        """The one that the gateway of this number belongs to."""
        del number
        return self

    @property
    def cache_blocks(self) -> int:
        """Of each worker."""
        return self._shape.cache_blocks

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a worker takes."""
        return self._shape.longest

    async def join(self, role: Role) -> ModelledWorker:
        """A new worker. Raises `RedisUnavailableError`."""
        worker = self._worker(f"{self._cell}{role.value}-{self._joined[role]:04}", role)
        self._joined[role] += 1
        self._revision[worker.name] = 0
        self.workers[_incarnation(worker.name)] = worker
        self.all_workers.append(worker)
        await self._heartbeat(worker)
        await self._publish(worker, [IndexUpdate(UpdateKind.CLEARED)])
        return worker

    async def leave(self, worker: ModelledWorker) -> None:
        """It finishes what it has and then goes. Raises `RedisUnavailableError`."""
        self._leaving.add(worker.name)
        await self._heartbeat(worker)

    def offered(self, role: Role) -> list[ModelledWorker]:
        """Workers of `role` that take new requests."""
        return [each for each in self.workers.values() if each.role is role and each.name not in self._leaving]

    def _worker(self, name: str, role: Role) -> ModelledWorker:
        return ModelledWorker(
            name=name,
            role=role,
            times=self._shape.times,
            capacity=self._shape.cache_blocks,
            block_tokens=self._shape.block_tokens,
            max_sequences=self._shape.max_sequences,
            events=self.redis.events,
            on_cache_change=lambda: self._cache_changed(name),
        )

    async def _beat(self) -> None:
        """Heartbeats of all workers. They write different rows, so their order does not matter."""
        if self.closing:
            return
        await self.redis.follow()
        await self._remove_idle()
        workers = tuple(self.workers.values())
        all_beat = len(workers) + self._others <= ALL_BEAT
        beating = workers if all_beat else tuple(filter(self._has_news, workers))
        for some in _slices(beating):
            await asyncio.gather(*(self._heartbeat(worker) for worker in some))
        self.redis.events.after(HEARTBEAT_S, self._beat)

    def _has_news(self, worker: ModelledWorker) -> bool:
        at, load = self._beaten[worker.name]
        return worker.load() != load or self.redis.events.now() - at >= BEAT_AGAIN_S

    async def _remove_idle(self) -> None:
        """Of those that leave and have nothing left to do."""
        done = [each for each in self.workers.values() if each.name in self._leaving and each.outstanding == 0]
        for worker in done:
            del self.workers[_incarnation(worker.name)]
            self._leaving.discard(worker.name)
            del self._beaten[worker.name]
            await self.redis.registry.deregister(_incarnation(worker.name))

    async def _heartbeat(self, worker: ModelledWorker) -> None:
        state = WorkerState.DRAINING if worker.name in self._leaving else WorkerState.READY
        record = WorkerRecord(view=self.view(worker), state=state, load=worker.load(), details={})
        self._beaten[worker.name] = self.redis.events.now(), record.load
        reply = await self.redis.registry.heartbeat(record, known_generation=self._generation, report_age_s=0.0)
        self._generation = reply.generation

    def view(self, worker: ModelledWorker) -> WorkerView:
        return WorkerView(
            worker_id=worker.name,
            incarnation=_incarnation(worker.name),
            role=worker.role,
            request_endpoint="tcp://127.0.0.1:5600",
            peer_endpoint="tcp://127.0.0.1:5601",
            compat_hash="simulated",
            context_length=self.longest,
            page_size=self._shape.block_tokens,
            model=MODEL,
        )

    def _cache_changed(self, name: str) -> None:
        if name not in self._publishing:
            self._publishing.add(name)
            self.redis.events.after(PACE_S, lambda: self._publish_changes(name))

    async def _publish_changes(self, name: str) -> None:
        self._publishing.discard(name)
        worker = self.workers.get(_incarnation(name))
        if worker is None:
            return
        updates = worker.cache.changes()
        if updates:
            await self._publish(worker, updates)

    async def _publish(self, worker: ModelledWorker, updates: list[IndexUpdate]) -> None:
        revision = self._revision[worker.name]
        self._revision[worker.name] = revision + 1
        applied = await self.redis.index.apply(
            _incarnation(worker.name),
            updates,
            page_size=self._shape.block_tokens,
            builds_on=revision,
            revision=revision + 1,
        )
        assert applied is Applied.APPLIED, f"the index of {worker.name} answered {applied}"


def _incarnation(name: str) -> str:
    return f"{name}@1"


def _slices(workers: tuple[ModelledWorker, ...]) -> Iterator[tuple[ModelledWorker, ...]]:
    return (workers[first : first + AT_ONCE] for first in range(0, len(workers), AT_ONCE))
