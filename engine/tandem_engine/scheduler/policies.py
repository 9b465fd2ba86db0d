"""Scheduling policies: which waiting request is admitted first, and which running one is put back first.

    fcfs         first come, first served. Retracted requests, and followers of a computed choice, are at the head of
                 the queue; a choice that another worker decodes keeps its place of arrival
    lpm          the longest cached prefix first
    dfs-weight   depth first through the cached prefixes of waiting requests, the branch with most requests first, so
                 that requests with a common prefix run one after the other while it is cached
    priority     the most important request first. It may preempt running ones whose priority is lower by `threshold`
                 or more (*outranked*)
    srf          the fewest remaining steps first; the request with the most is put back first. Steps are the chunks
                 of the prompt and one per token that may still be generated: an upper bound that is known in advance

A greater `Request.priority` is more important, here and in the API: SGLang's default, the opposite of vLLM. A policy
keeps no state between plans [admission-not-latched]: the same requests at the same times get the same order on every
rank.

No request starves. Under `fcfs` none is overtaken by its own tenant's, and tenants have turns (`queues`). Under `lpm`,
`dfs-weight` and `srf` a request that has waited for `aging.seconds` is *overdue*, and overdue requests go first, in
the order of the queue. Under `priority` a waiting request gains one level per `aging.seconds`: one of priority p goes
before every one of priority q > p that arrives more than (q − p) · seconds later. Age also protects it from preemption.

`SharedPrefixes`, for the first three: a request waits when at least `WORTH_WAITING` tokens after its cached prefix are
being computed for another request, until the completed chunks of that one are in the cache. Under `fcfs` the requests
after it wait too. `lpm` and `dfs-weight` serve queues longer than `MAX_MATCHED` in order of arrival, because matching
all of them costs more than it saves.

`PromptDelay` is vLLM's `--scheduler-delay-factor`: new prompts wait until the oldest has waited factor × the time of
the last step with prompts, as long as there are other requests to compute. All ranks read the same clock.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from tandem_engine.base.clock import Clock
from tandem_engine.config import SchedulePolicy, SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.prefix_cache import NoPrefixCache
from tandem_engine.memory.radix_cache import shared_blocks
from tandem_engine.messages.kv_events import TOKEN_BYTES, CacheSpace, pack_tokens
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


class Policy(Protocol):
    """One way to order waiting requests. Every one bounds how long a request can be passed over."""

    def order(self, queues: Queues) -> Iterator[Request]:
        """Waiting requests in the order in which they are tried.

        The planner takes each request that it gets out of the queue before it asks for the next, and asks no
        more after the first that has to wait: none overtakes it. Work starts with the first `next`.
        """
        ...

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        """The first of `requests`, which wait outside the queues for KV that is computed elsewhere.

        They come in order of arrival; None when there are none.
        """
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """The request that gives its memory back when there is too little. Never called with none."""
        ...


def first_come(requests: Iterable[Request]) -> Request | None:
    """The first request outside the queues where only arrival counts."""
    return next(iter(requests), None)


def least_important(candidates: Sequence[Request]) -> Request:
    """The newest of those with the least priority: the victim of every policy that has no better idea."""
    ranked = enumerate(candidates)
    _, victim = max(ranked, key=lambda entry: (-entry[1].priority, entry[1].arrived_at, entry[0]))
    return victim


class Aged(NamedTuple):
    """A queue in two parts, each in the order of the queue."""

    overdue: list[Request]
    others: list[Request]


@dataclass(frozen=True, kw_only=True, slots=True)
class Aging:
    """What waiting is worth."""

    clock: Clock
    seconds: float

    def split(self, waiting: Iterable[Request]) -> Aged:
        due = self.clock.now() - self.seconds
        aged = Aged([], [])
        for req in waiting:
            (aged.overdue if req.arrived_at <= due else aged.others).append(req)
        return aged

    def levels(self, req: Request) -> int:
        """How many times `seconds` have passed since `req` arrived."""
        return int((self.clock.now() - req.arrived_at) / self.seconds)


WORTH_WAITING = 32
"""Tokens, rounded up to pages. SGLang's threshold for the same decision."""


class SharedPrefixes:
    """What is being computed now, as prefixes that end `WORTH_WAITING` tokens after what is cached, or where a request
    can continue next."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._worth = memory.least_match(WORTH_WAITING)
        self._prefixes: set[tuple[CacheSpace, bytes]] = set()

    def cached(self, req: Request) -> int:
        """Tokens of `req` that the cache has now."""
        tokens = req.token_ids(0, req.seq_len)
        return self._memory.cached_len(tokens, space=req.space, max_match=req.longest_match)

    def computing(self, requests: Iterable[Request]) -> None:
        """Note those of `requests` whose prompt is on its way to the cache."""
        for req in requests:
            if req.kv is not None and req.kv.committed_len < req.extend_target:
                self.add(req, self.cached(req))

    def add(self, req: Request, cached: int) -> None:
        """`req`, of which `cached` tokens are cached, is computed now."""
        if cached + self._worth <= req.seq_len:
            self._prefixes.add(self._prefix(req, cached))

    def worth_waiting(self, req: Request, cached: int) -> bool:
        """Whether another request computes enough of what `req` needs next and may take from the cache."""
        return cached + self._worth <= req.longest_match and self._prefix(req, cached) in self._prefixes

    def _prefix(self, req: Request, cached: int) -> tuple[CacheSpace, bytes]:
        return req.space, pack_tokens(req.token_ids(0, cached + self._worth))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fcfs:
    """Implements `Policy`."""

    memory: KvMemory | None = None
    """Its prefix cache is what requests may wait for; None: no request waits."""

    def order(self, queues: Queues) -> Iterator[Request]:
        shared = None
        if self.memory is not None:
            shared = SharedPrefixes(self.memory)
            shared.computing(queues.requests.values())
        while (head := queues.waiting.head) is not None:
            if shared is None:
                yield head
                continue
            cached = shared.cached(head)
            if shared.worth_waiting(head, cached) and queues.groups.donor(head) is None:
                return
            yield head
            shared.add(head, cached)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return least_important(candidates)


MAX_MATCHED = 128
"""Waiting requests; SGLang's limit."""


class Candidate(NamedTuple):
    """A waiting request and the tokens that the cache has for it."""

    req: Request
    cached: int


Ranking: TypeAlias = Callable[[list[Candidate]], list[Candidate]]
"""Puts candidates, given in the order of the queue, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByPrefix:
    """Implements `Policy`."""

    memory: KvMemory
    aging: Aging
    ranking: Ranking

    def order(self, queues: Queues) -> Iterator[Request]:
        if len(queues.waiting) > MAX_MATCHED:
            yield from Fcfs().order(queues)
            return
        shared = SharedPrefixes(self.memory)
        shared.computing(queues.requests.values())
        overdue, others = self.aging.split(queues.waiting)
        for req in overdue:
            yield req
            shared.add(req, shared.cached(req))
        for req, cached in self.ranking([Candidate(req, shared.cached(req)) for req in others]):
            if not shared.worth_waiting(req, cached):
                yield req
                shared.add(req, cached)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return least_important(candidates)


class Path(NamedTuple):
    """A candidate and its cached tokens, packed: a way down the tree of all candidates' prefixes."""

    tokens: bytes
    candidate: Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaviestBranchFirst:
    """A `Ranking`. Equals keep the order of the queue."""

    page_size: int

    def __call__(self, candidates: list[Candidate]) -> list[Candidate]:
        by_space: defaultdict[CacheSpace, list[Path]] = defaultdict(list)
        for candidate in candidates:
            tokens = pack_tokens(candidate.req.token_ids(0, candidate.cached))
            by_space[candidate.req.space].append(Path(tokens, candidate))
        return [path.candidate for paths in _heaviest_first(by_space.values()) for path in self._depth_first(paths)]

    def _depth_first(self, paths: list[Path]) -> list[Path]:
        """Where `paths` part, their branches; then those that end there."""
        if len(paths) == 1:
            return paths
        block = self.page_size * TOKEN_BYTES
        # What the first and the last in order share, all between them share.
        tokens = [path.tokens for path in paths]
        branch_at = shared_blocks(min(tokens), max(tokens), block) * block
        branches: defaultdict[bytes, list[Path]] = defaultdict(list)
        for path in paths:
            branches[path.tokens[branch_at : branch_at + block]].append(path)
        ending = branches.pop(b"", [])
        below = (path for branch in _heaviest_first(branches.values()) for path in self._depth_first(branch))
        return [*below, *ending]


def _heaviest_first(branches: Iterable[list[Path]]) -> list[list[Path]]:
    return sorted(branches, key=len, reverse=True)


def longest_prefix_first(candidates: list[Candidate]) -> list[Candidate]:
    """Equals keep the order of the queue."""
    return sorted(candidates, key=lambda candidate: -candidate.cached)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByPriority:
    """Implements `Policy`, and selects the requests to preempt."""

    aging: Aging
    threshold: int

    def order(self, queues: Queues) -> Iterator[Request]:
        yield from sorted(queues.waiting, key=self._standing, reverse=True)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return max(requests, key=self._standing, default=None)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return self._most_expendable_first(candidates)[0]

    def outranked(self, head: Request, candidates: Sequence[Request]) -> list[Request]:
        """Those of `candidates` that `head` may put back, the most expendable first."""
        lower = [req for req in candidates if head.priority - req.priority - self.aging.levels(req) >= self.threshold]
        return self._most_expendable_first(lower)

    def _standing(self, req: Request) -> float:
        """Priority with age, less what is the same for all: the order of two requests never changes."""
        return req.priority - req.arrived_at / self.aging.seconds

    def _most_expendable_first(self, candidates: Sequence[Request]) -> list[Request]:
        """The newest of equals is the most expendable."""
        ranked = sorted(candidates, key=self._standing, reverse=True)
        ranked.reverse()
        return ranked


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestRemaining:
    """Implements `Policy`."""

    aging: Aging
    chunk: int
    """Prompt tokens of one step."""

    def order(self, queues: Queues) -> Iterator[Request]:
        overdue, others = self.aging.split(queues.waiting)
        yield from overdue
        yield from sorted(others, key=self.steps_left)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return max(reversed(candidates), key=lambda req: (self.steps_left(req), req.arrived_at))

    def steps_left(self, req: Request) -> int:
        """At most so many steps until `req` has its last token."""
        uncomputed = req.seq_len - req.launched_len
        return -(-uncomputed // self.chunk) + req.remaining_tokens


def make_policy(config: SchedulerConfig, *, memory: KvMemory, clock: Clock) -> Policy:
    """The policy that `config` names."""
    aging = Aging(clock=clock, seconds=config.policy_ageing_seconds)
    match config.schedule_policy:
        case SchedulePolicy.FCFS:
            return Fcfs(memory=None if isinstance(memory.cache, NoPrefixCache) else memory)
        case SchedulePolicy.LPM:
            return ByPrefix(memory=memory, aging=aging, ranking=longest_prefix_first)
        case SchedulePolicy.DFS_WEIGHT:
            return ByPrefix(memory=memory, aging=aging, ranking=HeaviestBranchFirst(page_size=memory.page_size))
        case SchedulePolicy.PRIORITY:
            return ByPriority(aging=aging, threshold=config.priority_preemption_threshold)
        case SchedulePolicy.SRF:
            return ShortestRemaining(aging=aging, chunk=config.chunked_prefill_size)


@dataclass(kw_only=True, slots=True)
class PromptDelay:
    """Belongs to one planner."""

    clock: Clock
    factor: float
    lag: int
    """Plans between that of a step and the first one after its beginning: 1 with overlap, else 0."""
    last_step_s: float = 0.0
    """Of the last step with prompts."""
    _planned_at: float | None = None
    _prompts: list[bool] = field(default_factory=list)
    """Whether the last steps computed prompts, the newest last: as many as may not have been measured."""

    def begin_plan(self) -> None:
        """A step is about to be planned: note how long the one that has ended since the last plan took."""
        now = self.clock.now()
        if self._planned_at is not None and len(self._prompts) > self.lag and self._prompts[-1 - self.lag]:
            self.last_step_s = now - self._planned_at
        self._planned_at = now

    def planned(self, *, prompts: bool) -> None:
        """The step computes prompts, or not."""
        self._prompts = [*self._prompts[-self.lag :], prompts] if self.lag else [prompts]

    def interrupt(self) -> None:
        """The next plan does not follow at once: the time until then is that of no step."""
        self._planned_at = None
        self._prompts.clear()

    def holds(self, queues: Queues) -> bool:
        """Whether those that wait stay in the queue, in a step that has others to compute."""
        if not len(queues.waiting):
            return False
        # A request that was admitted before and put back has waited already.
        if any(req.first_scheduled_at is not None for req in queues.waiting):
            return False
        oldest = min(req.arrived_at for req in queues.waiting)
        return self.clock.now() - oldest <= self.factor * self.last_step_s

    def note(self, queues: Queues, *, held: bool) -> None:
        """The step leaves those that wait in the queue for the delay's sake, or not: their time of it is kept."""
        now = self.clock.now()
        for req in queues.waiting:
            if req.delayed_since is not None:
                req.delayed_s += now - req.delayed_since
            req.delayed_since = now if held else None
