"""Where requests are: queues, groups of choices, deadlines.

Every live request is in exactly one place [one-home]:

    compiling   its grammar is not compiled, or its adapter not in memory; with KV, if a stage has handed it over
                in the meantime
    waiting     needs an EXTEND; arrival order, with retracted and recomputed requests at its head
    following   waits for another choice of the same response to compute their prompt
    prefetching will be waiting when its prefix has come from storage or from another engine
    swapped     retracted, its KV in host memory; resumes before any waiting request is admitted
    chunked     the one request whose prompt is partly computed
    running     decodes, one token per step
    leaving     its last chunk is in flight and a stage may keep it: it never decodes here
    a stage     lists it in `QueueStage.live`; it is in no queue of the scheduler

`requests` has all but the last kind by rid, for aborts and the audit.

`Groups` has the choices of one response, which share a prompt that is computed once. The first choice leads; later ones
*follow* outside the queue, so that they block no other request. Once the prompt is computed, followers go to the head
of the queue. Each takes the whole pages from the prefix cache and a copy of the partial one from a member that has it
(copy on write), and computes the prompt's last token to sample from. From then on members are independent. If the
leader ends early, the first follower leads. Names of groups are per client: two gateways may use the same.

`TenantOrder` gives each new request its place in the queue. With one tenant that is arrival order. Several tenants
have their prompts computed in turns (start-time fair queueing, Goyal et al., SIGCOMM '96):

    turn       where a request begins, in virtual tokens: where its tenant's last one ends, and not before `now`
    end        turn + all tokens of its prefill
    now        the furthest point that any prompt has been computed to

So a tenant without requests in the queue goes next, whatever others have queued (of equal turns, that of a tenant that
is behind is first), and two that have are computed token for token. Prompts that end before they are computed cost
nothing once their tenant has no other left. Time plays no part but in `shared`: whether several tenants had something
to do within `TENANT_WINDOW_S`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from tandem_engine.base.names import PageId, ReqPoolIdx, RequestId
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.request import Request, sends_kv
from tandem_engine.scheduler.stage import AwaitedPages, QueueStage


class GroupKey(NamedTuple):
    client: bytes
    name: str


class PageCopy(NamedTuple):
    """Copy all of one page onto another at the start of a step."""

    source: PageId
    target: PageId


@dataclass(kw_only=True, slots=True)
class Group:
    """Members in order of arrival. Every live one is in exactly one of the three places."""

    leader: Request | None
    """Computes the prompt; None once it is computed."""
    following: list[Request] = field(default_factory=list)
    apart: list[Request] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return self.leader is None and not self.following and not self.apart


@dataclass(kw_only=True, slots=True)
class Groups:
    """All groups of one scheduler."""

    _groups: dict[GroupKey, Group] = field(default_factory=dict)

    def follow(self, req: Request) -> bool:
        """Take in a request that is about to wait. True: it follows, and is kept here until its turn."""
        if not req.group:
            return False
        group = self._groups.get(_key(req))
        if group is None:
            self._groups[_key(req)] = Group(leader=req)
            return False
        if group.leader is None or not same_prompt(req, group.leader) or _is_late(req, group.leader):
            group.apart.append(req)
            return False
        group.following.append(req)
        group.following.sort(key=lambda member: member.arrived_at)
        return True

    def computed(self, req: Request) -> list[Request]:
        """The prompt of `req` is computed. Returns the followers that it kept waiting, in order."""
        group = self._groups.get(_key(req)) if req.group else None
        if group is None or group.leader is not req:
            return []
        ready, group.following = group.following, []
        group.leader = None
        group.apart += [req, *ready]
        return ready

    def gone(self, req: Request) -> Request | None:
        """`req` ended or left for good. Returns the follower that leads instead, which has to be queued now."""
        group = self._groups.get(_key(req)) if req.group else None
        if group is None:
            return None
        if group.leader is req:
            group.leader = group.following.pop(0) if group.following else None
            if group.leader is not None:
                return group.leader
        else:
            group.following = [member for member in group.following if member is not req]
            group.apart = [member for member in group.apart if member is not req]
        if group.empty:
            del self._groups[_key(req)]
        return None

    def donor(self, req: Request) -> RequestKv | None:
        """KV of another member in which the whole prompt of `req` is settled."""
        group = self._groups.get(_key(req)) if req.group else None
        for member in group.apart if group is not None else ():
            kv = member.kv
            if member is not req and kv is not None and kv.committed_len >= req.prompt_len and same_prompt(member, req):
                return kv
        return None

    def has(self, req: Request) -> bool:
        """Whether it is a member already."""
        group = self._groups.get(_key(req)) if req.group else None
        return group is not None and (group.leader is req or req in group.apart or req in group.following)

    def led(self) -> Iterator[tuple[Request, Sequence[Request]]]:
        """Leaders whose prompt is not computed, and their followers."""
        for group in self._groups.values():
            if group.leader is not None and group.following:
                yield group.leader, group.following

    def following(self) -> Iterator[Request]:
        """Requests that wait for a leader."""
        for group in self._groups.values():
            yield from group.following


def same_prompt(one: Request, other: Request) -> bool:
    """Whether the KV of their prompts may be shared."""
    return one.space == other.space and one.origin_input_ids == other.origin_input_ids


def _is_late(req: Request, leader: Request) -> bool:
    """Whether `req`, for another worker, was held up elsewhere and came before `leader`: that worker expects it first,
    and may have no pages for a leader that holds its own until then (`overtaken_reserve`)."""
    return sends_kv(req) and req.arrived_at < leader.arrived_at


def _key(req: Request) -> GroupKey:
    return GroupKey(req.client, req.group)


TENANT_WINDOW_S = 10.0
"""For so long a tenant without requests is expected back."""


@dataclass(kw_only=True, slots=True)
class _Line:
    """What is known of one tenant."""

    end: int = 0
    """Where its last request ends."""
    done: int = 0
    """The furthest point that a prompt of it has been computed to."""
    pending: set[Request] = field(default_factory=set)
    """Requests whose prompt is not computed."""
    seen: float = 0.0
    """When it last had something to do."""


@dataclass(kw_only=True, slots=True)
class TenantOrder:
    """One per scheduler. The same on all ranks: its only time is the one that decisions go by."""

    now: int = 0
    """In virtual tokens."""
    _lines: OrderedDict[str, _Line] = field(default_factory=OrderedDict)
    """Last seen last."""

    def see(self, tenant: str, now: float) -> None:
        """It has something to do. Tenants that are not expected back are forgotten."""
        self._lines.setdefault(tenant, _Line()).seen = now
        self._lines.move_to_end(tenant)
        while True:
            oldest, line = next(iter(self._lines.items()))
            if line.seen >= now - TENANT_WINDOW_S or line.end > self.now:
                return
            del self._lines[oldest]

    def arrive(self, req: Request, tokens: int) -> None:
        """Give `req`, whose prefill has so many tokens, its place."""
        line = self._lines.setdefault(req.tenant, _Line())
        req.is_behind = self.now - line.end >= tokens
        req.turn = max(self.now, line.end)
        req.turn_end = line.end = req.turn + tokens
        line.pending.add(req)

    def postpone(self, req: Request, turn: int) -> None:
        """`req` has its place at `turn` at the earliest."""
        later = max(0, turn - req.turn)
        req.turn, req.turn_end, req.is_behind = req.turn + later, req.turn_end + later, False
        line = self._lines.setdefault(req.tenant, _Line())
        line.end = max(line.end, req.turn_end)

    def computed(self, req: Request, stop: int, now: float) -> None:
        """The first `stop` tokens of `req` are computed by this step, at the time `now`."""
        reached = min(req.turn + stop, req.turn_end)
        self.now = max(self.now, reached)
        self.see(req.tenant, now)
        line = self._lines[req.tenant]
        line.done = max(line.done, reached)
        if reached == req.turn_end:
            line.pending.discard(req)

    def has_passed(self, req: Request) -> bool:
        """Whether others have been computed beyond the end of the turn of `req`, which is not. A tenant may be behind
        many others together, and these behind it: no prompt is to wait for all that they send."""
        return self.now >= req.turn_end

    def gone(self, req: Request) -> None:
        """`req` ended or left. A tenant whose prompts have all gone is not charged for what was not computed."""
        line = self._lines.get(req.tenant)
        if line is not None:
            line.pending.discard(req)
            if not line.pending:
                line.end = line.done

    def shared(self, now: float) -> bool:
        """Whether several tenants have something to do, or are expected back."""
        return any(line.seen >= now - TENANT_WINDOW_S for line in islice(reversed(self._lines.values()), 1, 2))

    @property
    def several(self) -> bool:
        """Whether requests of several tenants may be here."""
        return len(self._lines) > 1


class WaitingQueue:
    """In the order of `TenantOrder`; requests that had run before may also enter at the head."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def join(self, req: Request) -> None:
        """A new request, or one that was held up elsewhere: before those whose turn is later and has not come."""
        place = len(self._requests)
        while place and _is_later(self._requests[place - 1], req):
            place -= 1
        self._requests.insert(place, req)

    def return_to_head(self, req: Request) -> None:
        """A request that had been admitted before, or follows one that was; exempt from any cap [retraction-bounded].

        Only requests of other tenants whose turn is earlier stay before it.
        """
        place = 0
        while place < len(self._requests) and _keeps_its_turn(self._requests[place], req):
            place += 1
        self._requests.insert(place, req)

    def has(self, req: Request) -> bool:
        return req in self._requests

    def discard(self, req: Request) -> None:
        """Take `req` out, wherever it stands, if it is here."""
        if self.head is req:
            self._requests.popleft()
        elif req in self._requests:
            self._requests.remove(req)


def _keeps_its_turn(queued: Request, req: Request) -> bool:
    return queued.tenant != req.tenant and queued.turn < req.turn


def _is_later(queued: Request, req: Request) -> bool:
    return queued.first_scheduled_at is None and _place(queued) > _place(req)


def _place(req: Request) -> tuple[int, bool, float]:
    """Of equal turns, that of a tenant that is behind comes first."""
    return req.turn, not req.is_behind, req.arrived_at


@dataclass(kw_only=True, slots=True)
class Queues:
    """The homes of requests. The planner and the release path move requests between them."""

    compiling: dict[RequestId, Request] = field(default_factory=dict)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    tenants: TenantOrder = field(default_factory=TenantOrder)
    groups: Groups = field(default_factory=Groups)
    prefetching: dict[Request, AwaitedPages] = field(default_factory=dict)
    """In arrival order, with what each waits for."""
    reading: dict[Request, AwaitedPages] = field(default_factory=dict)
    """Prefixes that are fetched for requests in `compiling`."""
    swapped: deque[Request] = field(default_factory=deque)
    """The first to come back first."""
    chunked: Request | None = None
    running: list[Request] = field(default_factory=list)
    """In admission order. May hold finished requests until the next plan filters them [finished-rows-filtered]."""
    to_finish: list[Request] = field(default_factory=list)
    """Requests whose `to_finish` was set since, or that were in flight when last looked at."""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    stages: list[QueueStage] = field(default_factory=list)

    def take_over(self, req: Request) -> None:
        """Give a request with KV and a token its home: a stage has it no more."""
        self.requests[req.rid] = req
        if req.held_up:
            self.compiling[req.rid] = req
        else:
            self.running.append(req)

    def ready(self, req: Request) -> None:
        """Continue a request that has what held it up. No-op if it waits elsewhere, or has ended."""
        if req.held_up or self.compiling.pop(req.rid, None) is None:
            return
        prefetch = self.reading.pop(req, None)
        if req.kv is not None:
            self.running.append(req)
        elif req.swapped is not None:
            self.swapped.append(req)
        elif req.first_scheduled_at is not None:
            self.waiting.return_to_head(req)
        elif not self.groups.has(req) and self.groups.follow(req):
            return
        elif prefetch is None or prefetch.done:
            self.waiting.join(req)
        else:
            self.prefetching[req] = prefetch

    def join(self, req: Request) -> None:
        """`req`, which was kept elsewhere, waits for memory next, unless something holds it up."""
        if req.held_up:
            self.compiling[req.rid] = req
        else:
            self.waiting.join(req)

    def hold_up(self, req: Request) -> None:
        """`req`, which is held up from now on and has no KV on the device, waits in no line."""
        if req in self.swapped:
            self.swapped.remove(req)
        elif self.waiting.has(req):
            self.waiting.discard(req)
        else:
            return
        self.compiling[req.rid] = req

    def of_other_tenants(self, req: Request) -> list[Request]:
        """Requests in the queue that `req` may overtake there."""
        return [other for other in self.waiting if other.tenant != req.tenant] if self.tenants.several else []

    def give_up_turn(self, req: Request) -> bool:
        """`req` and the rest of its tenant go after others' prompts for other workers that came earlier.

        False if they do already.
        """
        others = (other for other in self.of_other_tenants(req) if sends_kv(other))
        turn = max((other.turn for other in others if other.arrived_at < req.arrived_at), default=req.turn)
        if turn <= req.turn or req.first_scheduled_at is not None:
            return False
        for mine in [mine for mine in self.waiting if mine.tenant == req.tenant and mine.first_scheduled_at is None]:
            self.waiting.discard(mine)
            self.tenants.postpone(mine, turn)
            self.waiting.join(mine)
        return True

    def parked(self) -> list[Request]:
        """Requests with KV that will run as soon as nothing holds them up."""
        return [req for req in self.compiling.values() if req.kv is not None]

    def live(self) -> Iterator[Request]:
        """Every request that is not finished, those that stages keep included."""
        yield from self.requests.values()
        for stage in self.stages:
            yield from stage.live()

    def enter(self, req: Request) -> bool:
        """`req` needs its prompt computed. False: it is kept here while something holds it up, or until another choice
        of its answer has computed the prompt."""
        self.requests[req.rid] = req
        follows = not req.held_up and self.groups.follow(req)
        self.tenants.arrive(req, 1 if follows else req.seq_len)
        if req.held_up:
            self.compiling[req.rid] = req
        return not (follows or req.held_up)

    def prompt_computed(self, req: Request) -> None:
        """Those that waited for the prompt of `req` go next, in their order."""
        for follower in reversed(self.groups.computed(req)):
            self._queue_follower(follower)

    def leave_group(self, req: Request) -> None:
        """`req` has finished, or lost its pages: its first follower has to lead."""
        leader = self.groups.gone(req)
        if leader is not None:
            self._queue_follower(leader)

    def _queue_follower(self, req: Request) -> None:
        """At the head, while what it shares is in the cache; unless another worker expects prompts as they came."""
        if req.held_up or sends_kv(req):
            self.join(req)
        else:
            self.waiting.return_to_head(req)

    @property
    def num_waiting(self) -> int:
        """Requests that had no memory yet, or lost it; those in stages and swapped ones are not counted."""
        compiling = len(self.compiling) - len(self.parked())
        return len(self.waiting) + len(self.prefetching) + compiling + sum(1 for _ in self.groups.following())

    def stage_keeps_any(self) -> bool:
        """Whether some stage has a request that will come back or go by itself."""
        return any(True for stage in self.stages for _ in stage.live())

    def stage_keeps_memory(self) -> bool:
        """Whether some stage, or a request that is held up, has pages that will come back."""
        if self.parked() or any(stage.holds_for_a_while() for stage in self.stages):
            return True
        return any(req.kv is not None for stage in self.stages for req in stage.live())

    def waiting_in_stages(self) -> int:
        """Requests in stages that have no pages yet."""
        return sum(req.kv is None for stage in self.stages for req in stage.live())

    def held_pages(self) -> Iterator[PageId]:
        """Pages in transfer holds."""
        for stage in self.stages:
            yield from stage.held_pages()

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        """Rows in transfer holds."""
        for stage in self.stages:
            yield from stage.held_rows()

    @property
    def head(self) -> Request | None:
        """The requests that get memory next."""
        return self.swapped[0] if self.swapped else self.waiting.head

    @property
    def without_memory(self) -> int:
        """Requests of the scheduler that hold neither row nor device pages."""
        return self.num_waiting + len(self.swapped)

    def leave_line(self, req: Request) -> None:
        """`req`, which holds no device memory, is about to end: take it out, wherever it waits."""
        self.waiting.discard(req)
        self.prefetching.pop(req, None)
        if req in self.swapped:
            self.swapped.remove(req)

    def forget(self, req: Request) -> None:
        """`req` finished or left for a stage. Running rows are filtered by the next plan [finished-rows-filtered]."""
        self.requests.pop(req.rid, None)
        self.tenants.gone(req)
        self.compiling.pop(req.rid, None)
        self.reading.pop(req, None)
        if self.chunked is req:
            self.chunked = None

    def drop_finished(self) -> None:
        """Filter the running batch. Each plan does, whatever path the step before took [finished-rows-filtered]."""
        self.running = [req for req in self.running if req.finished is None]

    def waiting_tokens(self) -> int:
        """Tokens that wait to be computed: the queue, prompts held up, and the rest of the chunked prompt."""
        tokens = sum(req.seq_len for req in self.waiting) + sum(req.seq_len for req in self.prefetching)
        tokens += sum(req.seq_len for req in self.compiling.values() if req.kv is None)
        if self.chunked is not None:
            tokens += self.chunked.extend_target - self.chunked.launched_len
        return tokens

    def oldest_wait(self, now: float) -> float:
        """Seconds for which the first of those waits that have not begun; 0 when none does."""
        held_up = (req for req in self.compiling.values() if req.kv is None)
        fresh = (req for req in chain(self.waiting, self.prefetching, held_up) if req.first_scheduled_at is None)
        return max((now - req.arrived_at for req in fresh), default=0.0)
