"""A simulated worker: the engine's queue, batch, prefix cache and steps, with times from published rates.

A job
    1. waits outside the queue for the prefix that the router considers worth fetching (`prefix_fetch`), if any,
       and then in the queue, first come first served
    2. its prompt is computed chunk by chunk, next to the tokens of decoding jobs
    3. it decodes here, or it waits for its transfer (`on_prompt`) and then releases its pages. One that is retracted
       returns to the head of the queue

`scheduler` decides which jobs are computed and which hold pages; here is the time that it takes. A job with an incoming
transfer skips the second part: `on_room` reports that its pages are there, `begin_decode` that its KV is. Equal decode
steps are one event; jobs that arrive during it wait for the step that runs.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.config import Role, SchedulerConfig
from tandem_lab.simulate.block_cache import BlockCache
from tandem_lab.simulate.clock import EventQueue
from tandem_lab.simulate.jobs import Job, Step
from tandem_lab.simulate.prefix_fetch import PrefixFetches, ServiceTimes
from tandem_lab.simulate.scheduler import ModelledScheduler
from tandem_services.router.cost import Load

Callback = Callable[[], None]


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
    retractions: int = 0
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
        self._scheduler = ModelledScheduler(
            name=name,
            cache=self.cache,
            block_tokens=block_tokens,
            config=SchedulerConfig(max_running_requests=max_sequences, chunked_prefill_size=times.chunk_tokens),
            on_cache_change=on_cache_change,
            on_retracted=self._retracted,
        )
        self._submitted = 0
        self._fetching: list[Job] = []
        """Requests outside the queue until their prefix has arrived."""
        self._running: _RunningStep | None = None

    @property
    def outstanding(self) -> int:
        """Requests here that have not ended."""
        queues = self._scheduler
        queued = len(self._fetching) + len(queues.waiting) + len(queues.incoming)
        return queued + queues.sequences + queues.computes_for_others

    def submit(self, job: Job) -> None:
        self._submitted += 1
        job.serial = self._submitted
        if job.wanted is not None and self.fetches.fetch(job.chain, job.wanted, lambda: self._fetched(job)):
            self._fetching.append(job)
            return
        (self._scheduler.waiting if job.on_room is None else self._scheduler.incoming).append(job)
        self.wake()

    def turn_left_s(self) -> float:
        """Seconds until the current step ends and the worker reads its messages; 0 if it is idle."""
        running = self._running
        if running is None:
            return 0.0
        now = self._events.now()
        return max(0.0, running.began + running.seconds * (running.passed(now) + 1) - now)

    def begin_decode(self, job: Job) -> None:
        """The KV of a job that got room has arrived, and so has its first token."""
        ended = self._scheduler.received(job)
        self._token(job)
        if ended:
            job.on_end()
        self.wake()

    def release(self, job: Job) -> None:
        """A job without output here has been transferred."""
        self._scheduler.sent(job)
        self.wake()

    def load(self) -> Load:
        """What the worker reports, as `tandem_services.worker.registration` does from the engine's statistics."""
        scheduler = self._scheduler
        queued = (*scheduler.waiting, *self._fetching)
        waiting_tokens = sum(job.prompt_tokens + job.generated for job in queued)
        return Load(
            queue_tokens=waiting_tokens + scheduler.unfinished_tokens,
            prefill_rate=self._times.prefill_rate,
            sequences=scheduler.sequences + sum(job.output_tokens > 0 for job in queued) + len(scheduler.incoming),
            step_s=self._times.decode_step_s(max(1, scheduler.decoding)),
            room_tokens=self.cache.room * self._block,
            max_sequences=self._max_sequences,
            token_bytes=self._times.token_bytes,
            transfer_rate=self._times.transfer_rate,
        )

    def wake(self) -> None:
        """A request arrived or pages became free: the current step is the last of its batch."""
        if self._running is None:
            self._next_step()
        elif self._running.count > 1:
            self._cut_short(self._running)

    def _fetched(self, job: Job) -> None:
        """Its prefix has come, or what is left of it: in the queue it stands where it would have stood."""
        self._fetching.remove(job)
        insort(self._scheduler.waiting, job, key=lambda each: (each.retractions == 0, each.serial))
        self.wake()

    def _cut_short(self, running: "_RunningStep") -> None:
        passed = running.passed(self._events.now()) + 1
        if passed < running.count:
            running.count = passed
            self._plan_end(running)

    def _next_step(self) -> None:
        step = self._scheduler.plan()
        if step is None:
            return
        self._running = _RunningStep(
            step=step,
            began=self._events.now(),
            seconds=self._times.step_s(prompt_tokens=step.prompt_tokens, sequences=step.rows),
            count=step.count,
        )
        self._plan_end(self._running)

    def _plan_end(self, running: "_RunningStep") -> None:
        planned = running.count
        # Does nothing when the run of steps was cut short since.
        self._events.at(running.began + running.seconds * planned, lambda: self._end(running, planned))

    def _end(self, running: "_RunningStep", planned: int) -> None:
        if running is not self._running or running.count != planned:
            return
        self._running = None
        self._count(running)
        end = self._scheduler.end(running.step, running.count)
        for job in end.prompts:
            self._token(job)
        for job in end.ended:
            job.on_end()
        # A callback may have begun the next one.
        if self._running is None:
            self._next_step()

    def _count(self, running: "_RunningStep") -> None:
        tokens = running.count * running.step.rows
        self.done.busy_s += running.seconds * running.count
        self.done.output_tokens += tokens
        self.done.computed_tokens += running.step.prompt_tokens
        if tokens:
            self.done.gaps[running.seconds] = self.done.gaps.get(running.seconds, 0) + tokens

    def _retracted(self, job: Job) -> None:
        self.done.retractions += 1
        if job.stopped_at is None and job.generated:
            job.stopped_at = self._events.now()

    def _token(self, job: Job) -> None:
        """Its prefill is complete, which gives a token where it decodes."""
        self.done.output_tokens += job.output_tokens > 0
        if job.stopped_at is not None:
            gap = self._events.now() - job.stopped_at
            self.done.gaps[gap] = self.done.gaps.get(gap, 0) + 1
            job.stopped_at = None
            return
        if job.on_room is None:
            self.done.requests += 1
            self.done.hit_blocks += job.matched
            self.done.prompt_blocks += job.prompt_tokens // self._block
        job.on_prompt()


@dataclass(slots=True, eq=False, kw_only=True)
class _RunningStep:
    """`count` equal steps in a row."""

    step: Step
    began: float
    seconds: float
    count: int

    def passed(self, now: float) -> int:
        """Of its steps, those that have ended."""
        return int((now - self.began) / self.seconds)
