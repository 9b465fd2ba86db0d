"""Simulated time: a clock that jumps from one event to the next, and the router's functions in a Redis with that time.

Events at the same time happen in the order in which they were planned, so a run is a function of its inputs.

Leases, report ages and reservations count simulated milliseconds, which `SimulatedRedis.follow` writes before each use
of Redis. Redis itself expires keys by its own time, so nothing is set to expire within a day.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.index import BlockIndex
from tandem_services.router.keys import MAX_WORKERS, Keys
from tandem_services.router.redis_functions import CONSTANTS, FunctionLibrary, LibrarySource, library_source
from tandem_services.router.registry import Registry
from tandem_services.router.shared_state import FairBoard

Action = Callable[[], Awaitable[None] | None]


@dataclass(slots=True)
class EventQueue:
    """A `Clock` and the events that move it. Seconds from the start of the run."""

    _now: float = 0.0
    _planned: int = 0
    _events: list[tuple[float, int, Action]] = field(default_factory=list)

    def now(self) -> float:
        return self._now

    def at(self, time: float, action: Action) -> None:
        """Plan `action`; a time that has passed means at once."""
        self._planned += 1
        heappush(self._events, (max(time, self._now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self._now + seconds, action)

    async def run(self) -> None:
        """Until no event is left."""
        while self._events:
            self._now, _, action = heappop(self._events)
            waiting = action()
            if waiting is not None:
                await waiting


PATIENCE_S = 60.0
"""A run that fell back to local routing because this machine was busy would not be repeatable: it fails instead."""

START_MS = 1_000_000
"""Redis time at the start: leases and reservations are never of before it."""

DAY_MS = 86_400_000
EXPIRIES = dict.fromkeys(("INDEX_TTL_MS", "FLEET_TTL_MS", "LEASE_MS", "FENCE_AFTER_MS", "DESCRIBED_TTL_MS"), DAY_MS)

REPEATABLE = {"SWEPT_BUCKETS": 0}
"""The sweep of the index by block looks at random entries."""

PRICE_ALL = {"ALL_UP_TO": MAX_WORKERS}
"""All workers are candidates of each decision, in a fleet of any size."""

NO_NOTES = {"EXPIRY_FACTOR": 0, "EXPIRY_SLACK_MS": 0}
"""Prompts in flight are not noted for longer than a moment."""

ORDERED_HASHES = {"hash-max-listpack-entries": 4096, "hash-max-listpack-value": 4096}
"""As many workers as there may be where a run is to give the same result again, and rows with as many reservations as
they may have. In a larger fleet the order of rows, and with it which of equal workers is taken, differs by run."""

CLOCK = """\
local function now_ms()
  return tonumber(redis.call('GET', '{key}'))
end
"""


@dataclass(kw_only=True)
class SimulatedRedis:
    """One cluster name's registry and index."""

    address: RedisAddress
    cluster: str
    events: EventQueue
    clock_of: str = ""
    """Cluster whose time this one has; "": its own."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Of the functions, other than those of the product."""
    keys: Keys = field(init=False)
    source: LibrarySource = field(init=False)
    client: RedisClient = field(init=False)
    registry: Registry = field(init=False)
    index: BlockIndex = field(init=False)
    fairness: FairBoard = field(init=False)
    _written: int = -1

    def __post_init__(self) -> None:
        self.keys = Keys(self.cluster)
        constants = {**CONSTANTS, **EXPIRIES, **REPEATABLE, **self.constants}
        self.source = library_source(constants, clock=CLOCK.format(key=self._clock_key))
        self.client = RedisClient(self.address, timeout_s=PATIENCE_S)
        library = FunctionLibrary(self.client, self.source)
        self.registry = Registry(library=library, keys=self.keys)
        self.index = BlockIndex(library=library, keys=self.keys)
        self.fairness = FairBoard(library=library, keys=self.keys)

    @property
    def _clock_key(self) -> str:
        return Keys(self.clock_of or self.cluster).prefix + "simulated_clock"

    async def begin(self) -> None:
        """Keep hashes in the order in which they were written: otherwise it is another one in each Redis process, and
        with it which of equal workers is taken. Raises `RedisUnavailableError`."""
        for option, value in ORDERED_HASHES.items():
            await self.client.command("CONFIG", "SET", option, value)

    async def follow(self) -> None:
        """Redis time is the simulation's from now on. Raises `RedisUnavailableError`."""
        now = START_MS + int(self.events.now() * 1000)
        if now != self._written:
            await self.client.command("SET", self._clock_key, now)
            self._written = now
