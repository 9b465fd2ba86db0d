"""Routing policies: which workers the cost model may choose from. One policy per role, selected by name.

The router applies the policy of the decode role first, then that of the prefill role among workers that can hand off to
those. Excluded workers are left out of the query, as are workers on which the request has failed. Everything else stays
as it is: the cost model, pair or single worker, reservation and explain.

`Session` sends requests of one user or conversation to one worker; a worker that leaves moves only its own keys. The
key is the request's `user`. A request without one is placed by its id.

`SlowStart` is the ramp of `Ramping`. A worker that has just registered has an empty queue and is therefore the cheapest
for every gateway at once, but it still compiles kernels and opens connections. Its share grows from zero to full within
`RAMP_S`. It does not apply while all workers are new: at the start of a fleet or of this gateway.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from random import Random
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import ConfigError
from tandem_engine.config import Role
from tandem_services.router.decision import RouteQuery, WorkerView

RAMP_S = 10.0
"""Ten heartbeats: by then the actual load of a new worker is in its reports."""

START_S = 30.0
"""Workers of one fleet load weights at different speed: those registered within this time belong to its start."""

FORGET_S = 60.0


@dataclass(slots=True)
class SlowStart:
    """When each worker was first seen, and the share of requests that it may get. One instance per router."""

    clock: Clock
    _first: dict[str, float] = field(default_factory=dict)
    """Incarnation → when it was first seen, or early enough for one that belongs to the start."""
    _last: dict[str, float] = field(default_factory=dict)
    _began: float | None = None
    """When the first worker was seen."""
    _young_until: float = -math.inf

    def observe(self, incarnations: Collection[str]) -> None:
        """The current fleet. A worker is forgotten after `FORGET_S` of absence, not at once: Redis may have lost it."""
        now = self.clock.now()
        if self._began is None and incarnations:
            self._began = now
        starting = self._began is None or now - self._began < START_S
        for incarnation in incarnations:
            self._last[incarnation] = now
            if incarnation not in self._first:
                self._first[incarnation] = first = now - RAMP_S if starting else now
                self._young_until = max(self._young_until, first + RAMP_S)
        for incarnation in [one for one, last in self._last.items() if now - last > FORGET_S]:
            del self._first[incarnation], self._last[incarnation]

    @property
    def any(self) -> bool:
        """Whether a worker does not have its full share yet."""
        return self.clock.now() < self._young_until

    def young(self) -> tuple[str, ...]:
        """Those without their full share, in the order in which they were seen."""
        # What was seen later comes later.
        since = self.clock.now() - RAMP_S
        late = list(takewhile(lambda item: item[1] > since, reversed(self._first.items())))
        return tuple(name for name, _ in reversed(late))

    def share(self, incarnation: str) -> float:
        """From 0 for one seen just now to 1, also for one that no view has shown."""
        first = self._first.get(incarnation)
        return 1.0 if first is None else min(1.0, (self.clock.now() - first) / RAMP_S)


@dataclass(frozen=True, slots=True)
class Contender:
    """A live worker that may take the request."""

    incarnation: str
    outstanding: float
    """What this gateway has sent to it and not got back: seconds of prompts on a prefill worker, else sequences."""


class Fitting(Protocol):
    """The workers that could take a query."""

    def __iter__(self) -> Iterator[WorkerView]: ...

    def find(self, incarnation: str) -> WorkerView | None:
        """This one, if it is among them."""
        ...

    def like(self, worker: WorkerView, *, first: float) -> Iterator[WorkerView]:
        """Those of its role and compat hash, it included, for readers that stop early. `first`: 0 to 1, where to
        begin."""
        ...


class Policy(Protocol):
    """One for each role of each router; it may keep state."""

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        """Those of `contenders` (at least one, in the order of their names) that stay; at least one."""
        ...


class AnyWorker:
    """Of queries that explore."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        return [self._random.choice(contenders)]


class LeastLoaded:
    def __init__(self, random: Random) -> None:
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        least = min(each.outstanding for each in contenders)
        return [self._random.choice([each for each in contenders if each.outstanding <= least])]


class Locality:
    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        return contenders


class PowerOfTwo:
    def __init__(self, random: Random) -> None:
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        two = self._random.sample(contenders, min(2, len(contenders)))
        return [min(two, key=lambda each: each.outstanding)]


class Ramping:
    """`policy` among those that take part. A worker alone always does."""

    def __init__(self, policy: Policy, share: Callable[[str], float], random: Random) -> None:
        """`share`: 0 to 1 by incarnation."""
        self._policy = policy
        self._share = share
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        taking_part = [each for each in contenders if self._takes_part(each.incarnation)]
        return self._policy.narrow(taking_part or contenders, query)

    def _takes_part(self, incarnation: str) -> bool:
        share = self._share(incarnation)
        return share >= 1.0 or self._random.random() < share


class RoundRobin:
    """Remembers the name and not the position, so that workers may come and go."""

    def __init__(self) -> None:
        self._last = ""

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        following = [each for each in contenders if each.incarnation > self._last]
        chosen = (following or contenders)[0]
        self._last = chosen.incarnation
        return [chosen]


class Session:
    """Rendezvous hashing: the worker whose digest with the key is highest. Keeps no state, so gateways agree."""

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        key = (query.session_key or query.request_id).encode("utf-8", "surrogatepass")
        salted = blake2b(key, digest_size=16, salt=blake2b(query.cache_salt.encode(), digest_size=16).digest()).digest()
        return [max(contenders, key=lambda each: blake2b(each.incarnation.encode(), key=salted).digest())]


POLICIES: Mapping[str, Callable[[Random], Policy]] = {
    "locality": lambda _: Locality(),
    "round_robin": lambda _: RoundRobin(),
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "session": lambda _: Session(),
}
LOCALITY = "locality"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyNames:
    """Which policy each role has."""

    prefill: str = LOCALITY
    """Policy of prefill workers."""
    decode: str = LOCALITY
    """Policy of decode workers and of workers with both roles."""

    def __str__(self) -> str:
        """In the form that `parse` reads."""
        return f"prefill={self.prefill},decode={self.decode}"

    @property
    def narrow(self) -> bool:
        """Whether they ever pass a worker over."""
        return (self.prefill, self.decode) != (LOCALITY, LOCALITY)

    @classmethod
    def parse(cls, text: str, *, flag: str = "--router-policy") -> "PolicyNames":
        """`NAME` for both roles, or `prefill=NAME,decode=NAME`. Raises `ConfigError`, which names `flag`."""
        if "=" not in text:
            return cls(prefill=_known(text, flag), decode=_known(text, flag))
        named = {}
        for part in text.split(","):
            role, _, name = part.partition("=")
            if role not in ("prefill", "decode") or role in named:
                raise ConfigError(f"{flag} {text[:200]!r}: expected a name, or prefill=NAME,decode=NAME")
            named[role] = _known(name, flag)
        return cls(**named)


def _known(name: str, flag: str) -> str:
    if name not in POLICIES:
        raise ConfigError(f"{flag}: there is no policy {name[:100]!r}; choose from {', '.join(POLICIES)}")
    return name


class PoliciesByRole:
    """Narrows what a query may choose among. `outstanding` is as in `Contender`."""

    def __init__(
        self,
        names: PolicyNames,
        random: Random,
        outstanding: Callable[[WorkerView], float],
        *,
        slow_start: SlowStart,
        exploration: float = 0.0,
    ) -> None:
        """`exploration`: share of queries that go to any worker of each role."""

        def ramping(policy: Policy) -> Policy:
            return Ramping(policy, slow_start.share, random)

        self._prefill = ramping(POLICIES[names.prefill](random))
        self._decode = ramping(POLICIES[names.decode](random))
        self._any = ramping(AnyWorker(random))
        self._random = random
        self._exploration = exploration
        self._outstanding = outstanding
        self._slow_start = slow_start
        self._narrows = names.narrow

    def passed_over(self, workers: Fitting, query: RouteQuery) -> frozenset[str]:
        """Incarnations among `workers` that the policies leave out.

        Where both policies are `locality` and the query does not explore, it looks at new workers, and at few others.
        """
        explores = self._exploration > 0.0 and self._random.random() < self._exploration
        if not explores and not self._narrows:
            return self._ramping(workers) if self._slow_start.any else frozenset()
        candidates = sorted(workers, key=lambda each: each.incarnation)
        decodes = [each for each in candidates if each.role is not Role.PREFILL]
        holders = self._kept(self._any if explores else self._decode, decodes, query)
        kinds = {each.compat_hash for each in decodes if each.incarnation in holders}
        prefills = [each for each in candidates if each.role is Role.PREFILL and each.compat_hash in kinds]
        kept = holders | self._kept(self._any if explores else self._prefill, prefills, query)
        return frozenset(each.incarnation for each in candidates) - kept

    def _ramping(self, workers: Fitting) -> frozenset[str]:
        """New workers that do not take part. Those of a kind that has no others do."""
        out = {name for name in self._slow_start.young() if self._random.random() >= self._slow_start.share(name)}
        left_out = [worker for name in sorted(out) if (worker := workers.find(name)) is not None]
        kinds = {(worker.role, worker.compat_hash): worker for worker in left_out}
        served = {kind for kind, worker in kinds.items() if self._has_others(workers, worker, out)}
        return frozenset(each.incarnation for each in left_out if (each.role, each.compat_hash) in served)

    def _has_others(self, workers: Fitting, worker: WorkerView, out: set[str]) -> bool:
        return any(each.incarnation not in out for each in workers.like(worker, first=self._random.random()))

    def _kept(self, policy: Policy, workers: Sequence[WorkerView], query: RouteQuery) -> frozenset[str]:
        if not workers:
            return frozenset()
        contenders = [Contender(each.incarnation, self._outstanding(each)) for each in workers]
        return frozenset(each.incarnation for each in policy.narrow(contenders, query))
