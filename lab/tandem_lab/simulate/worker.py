"""A simulated worker: the engine's queue, batch, prefix cache and steps, with times from published rates.

A job
    1. waits outside the queue for the prefix that the router considers worth fetching (`prefix_fetch`), if any,
       and in the queue, first come first served, until its pages fit (and, where it decodes, a row is free);
       then it takes pages for its prompt and all of its output, and holds what is cached of the prompt
    2. its prompt is computed chunk by chunk, one prompt at a time; decoding jobs get a token per step
    3. it decodes here, or it waits for its transfer (`on_prompt`) and then releases its pages

A job with an incoming transfer skips the second part: `on_room` reports that its pages are there, `begin_decode` that
its KV is. Consecutive decode steps of one batch are one event; jobs that arrive during it wait for the step that runs.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from tandem_engine.config import Role
from tandem_lab.simulate.block_cache import BlockCache
from tandem_lab.simulate.clock import EventQueue
from tandem_lab.simulate.prefix_fetch import PrefixFetches, ServiceTimes, WantedPrefix
from tandem_services.router.cost import Load

Callback = Callable[[], None]


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """What one worker does for one request."""

    chain: Sequence[bytes]
    """Digests of the prompt's whole blocks."""
    prompt_tokens: int
    output_tokens: int
    """To decode here; 0 on a prefill worker."""
    on_prompt: Callback
    """The prompt is computed; where the job decodes, the first token is there."""
    on_end: Callback
    """The last token is there."""
    on_room: Callback | None = None
    """Pages are there: the prompt is computed elsewhere. None: it is computed here."""
    wanted: WantedPrefix | None = None
    """What to fetch before it joins the queue."""
    serial: int = 0
    """Which of the worker's jobs it is."""
    matched: int = 0
    """Blocks found in the cache on admission."""
    missing_tokens: int = 0
    """Prompt tokens to compute or to receive, as of admission."""
    left: int = 0
    """Prompt tokens still to compute."""
    private: int = 0


@dataclass(kw_only=True, slots=True)
class WorkDone:
    """What a worker has done since the start."""

    busy_s: float = 0.0
    requests: int = 0
    """Prompts computed."""
    computed_tokens: int = 0
    hit_blocks: int = 0
    prompt_blocks: int = 0
    output_tokens: int = 0
    gaps: dict[float, int] = field(default_factory=dict)
    """Seconds between two tokens → how often."""


class ModelledWorker:
    """See the module docstring."""

    def __init__(
        self,
        *,
        name: str,
        role: Role,
        times: ServiceTimes,
        capacity: int,
        block_tokens: int,
        max_sequences: int,
        events: EventQueue,
        on_cache_change: Callback,
    ) -> None:
        self.name = name
        self.role = role
        self.cache = BlockCache(capacity)
        self.done = WorkDone()
        self.fetches = PrefixFetches(
            cache=self.cache, times=times, block_tokens=block_tokens, events=events, on_cache_change=on_cache_change
        )
        self._times = times
        self._block = block_tokens
        self._max_sequences = max_sequences
        self._events = events
        self._on_cache_change = on_cache_change
        self._submitted = 0
        self._fetching: list[Job] = []
        """Requests outside the queue until their prefix has arrived."""
        self._waiting: deque[Job] = deque()
        self._incoming: deque[Job] = deque()
        """Requests whose prompt is computed elsewhere: they do not wait for a prompt here."""
        self._computing: Job | None = None
        self._sequences = 0
        """Rows in use: decoding, or admitted and going to."""
        self._decoding: list[tuple[int, int, Job]] = []
        """By the step that gives the last token."""
        self._joining: list[Job] = []
        """Decode from the next step on."""
        self._steps = 0
        self._order = 0
        self._step: _RunningStep | None = None

    @property
    def outstanding(self) -> int:
        """Requests here that have not ended."""
        sending = self._computing is not None and self._computing.output_tokens == 0
        return len(self._fetching) + len(self._waiting) + len(self._incoming) + self._sequences + sending

    def submit(self, job: Job) -> None:
        self._submitted += 1
        job.serial = self._submitted
        if job.wanted is not None and self.fetches.fetch(job.chain, job.wanted, lambda: self._fetched(job)):
            self._fetching.append(job)
            return
        (self._waiting if job.on_room is None else self._incoming).append(job)
        self.wake()

    def turn_left_s(self) -> float:
        """Seconds until the current step ends and the worker reads its messages; 0 if it is idle."""
        step = self._step
        if step is None:
            return 0.0
        now = self._events.now()
        return max(0.0, step.began + step.seconds * (step.passed(now) + 1) - now)

    def begin_decode(self, job: Job) -> None:
        """The KV of a job that got room has arrived, and so has its first token."""
        self._store_prompt(job)
        self._first_token(job)
        self.wake()

    def let_go(self, job: Job) -> None:
        """A job without output here has been transferred."""
        self._release(job)
        self.wake()

    def load(self) -> Load:
        """What the worker reports, as `tandem_services.worker.registration` does from the engine's statistics."""
        unfinished = 0 if self._computing is None else self._computing.left
        queued = (*self._waiting, *self._fetching)
        return Load(
            queue_tokens=sum(job.prompt_tokens for job in queued) + unfinished,
            prefill_rate=self._times.prefill_rate,
            sequences=self._sequences + sum(job.output_tokens > 0 for job in queued) + len(self._incoming),
            step_s=self._times.decode_step_s(max(1, len(self._decoding))),
            room_tokens=self.cache.room * self._block,
            max_sequences=self._max_sequences,
            token_bytes=self._times.token_bytes,
            transfer_rate=self._times.transfer_rate,
        )

    def _pages(self, job: Job) -> int:
        return ceil((job.prompt_tokens + job.output_tokens) / self._block)

    def _fetched(self, job: Job) -> None:
        """Its prefix has come, or what is left of it: in the queue it stands where it would have stood."""
        self._fetching.remove(job)
        insort(self._waiting, job, key=lambda each: each.serial)
        self.wake()

    def wake(self) -> None:
        """A request arrived or pages became free: the current step is the last of its batch."""
        if self._step is None:
            self._next_step()
        elif self._step.count > 1:
            self._cut_short(self._step)

    def _cut_short(self, step: "_RunningStep") -> None:
        passed = step.passed(self._events.now()) + 1
        if passed < step.count:
            step.count = passed
            self._plan_end(step)

    def _next_step(self) -> None:
        self._admit(self._incoming)
        self._admit(self._waiting)
        for job in self._joining:
            self._order += 1
            heappush(self._decoding, (self._steps + job.output_tokens - 1, self._order, job))
        self._joining.clear()
        rows = len(self._decoding)
        if self._computing is not None:
            tokens = min(self._computing.left, self._times.chunk_tokens)
            self._begin(self._times.prefill_s(tokens) + self._times.decode_step_s(rows), 1, tokens)
        elif rows:
            self._begin(self._times.decode_step_s(rows), self._decoding[0][0] - self._steps, 0)

    def _begin(self, seconds: float, count: int, tokens: int) -> None:
        self._step = _RunningStep(self._events.now(), seconds, count, tokens)
        self._plan_end(self._step)

    def _plan_end(self, step: "_RunningStep") -> None:
        planned = step.count
        # Does nothing when the run of steps was cut short since.
        self._events.at(step.began + step.seconds * planned, lambda: self._end(step, planned))

    def _end(self, step: "_RunningStep", planned: int) -> None:
        if step is not self._step or step.count != planned:
            return
        self._step = None
        self._count(step)
        self._steps += step.count
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._finish(heappop(self._decoding)[2])
        if step.tokens:
            self._computed(step.tokens)
        self._next_step()

    def _count(self, step: "_RunningStep") -> None:
        tokens = step.count * len(self._decoding)
        self.done.busy_s += step.seconds * step.count
        self.done.output_tokens += tokens
        if tokens:
            self.done.gaps[step.seconds] = self.done.gaps.get(step.seconds, 0) + tokens

    def _admit(self, queue: deque[Job]) -> None:
        while queue:
            job = queue[0]
            # Matched when its turn comes, so that it finds what the prompt before it has left.
            if job.on_room is None and self._computing is not None:
                return
            matched = self.cache.match(job.chain)
            if self._pages(job) - matched + self.cache.idle_among(job.chain[:matched]) > self.cache.room:
                return
            if job.output_tokens and self._sequences >= self._max_sequences:
                return
            queue.popleft()
            self._take(job, matched)

    def _take(self, job: Job, matched: int) -> None:
        self.cache.hold(job.chain[:matched])
        job.matched = matched
        job.missing_tokens = job.left = max(1, job.prompt_tokens - matched * self._block)
        job.private = self._pages(job) - matched
        self.cache.take(job.private)
        self._on_cache_change()
        self._sequences += job.output_tokens > 0
        if job.on_room is None:
            self._computing = job
            self.done.requests += 1
            self.done.hit_blocks += matched
            self.done.prompt_blocks += len(job.chain)
        else:
            job.on_room()

    def _computed(self, tokens: int) -> None:
        job = self._computing
        assert job is not None
        self.done.computed_tokens += tokens
        job.left -= tokens
        if job.left:
            return
        self._computing = None
        self._store_prompt(job)
        if job.output_tokens:
            self._first_token(job)
        else:
            job.on_prompt()

    def _store_prompt(self, job: Job) -> None:
        self.cache.store(job.chain, job.matched)
        job.private -= len(job.chain) - job.matched
        self._on_cache_change()

    def _first_token(self, job: Job) -> None:
        self.done.output_tokens += 1
        job.on_prompt()
        if job.output_tokens == 1:
            self._finish(job)
        else:
            self._joining.append(job)

    def _finish(self, job: Job) -> None:
        self._sequences -= 1
        self._release(job)
        job.on_end()

    def _release(self, job: Job) -> None:
        self.cache.let_go(job.chain)
        self.cache.give_back(job.private)


@dataclass(slots=True, eq=False)
class _RunningStep:
    """`count` equal steps in a row."""

    began: float
    seconds: float
    count: int
    tokens: int
    """Prompt tokens of the (then single) step."""

    def passed(self, now: float) -> int:
        """Of its steps, those that have ended."""
        return int((now - self.began) / self.seconds)
