"""The engine's scheduler over modelled memory: which jobs the next step computes, which take and release pages.

It decides as `tandem_engine.scheduler` does with the policy `fcfs`, mixed steps and no host memory:

    pages      a prompt takes them chunk by chunk and an output block by block, when its next token needs one
    room       running requests that have none for their next token make the newest one give all of its back: it is
               *retracted*, waits at the head of the queue and computes what the cache has lost
    admission  reserves what running requests are expected to need: a share of the output that they may still have. The
               share decays with each decode step, and a retraction resets it. `watermark` of the pool stays free
    prompts    share the step's budget in order; one at a time may be partly computed. A prompt waits while another
               computes what it can take from the cache afterwards

A trace does not have the tokens of outputs, so no later prompt could find them in the cache. Blocks of an output get
digests of their own. A retracted job leaves them in the cache, as in the engine, and finds them again; a job that ends
does so only with `caches_outputs`, because elsewhere they would take room and never be found.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from math import ceil

from tandem_engine.config import SchedulerConfig
from tandem_engine.messages.kv_events import DIGEST_BYTES
from tandem_lab.simulate.block_cache import BlockCache
from tandem_lab.simulate.jobs import Callback, Job, PromptPart, Step, StepEnd

WORTH_WAITING = 32
"""As `tandem_engine.scheduler.policies.WORTH_WAITING`, in tokens."""


@dataclass(kw_only=True, slots=True)
class NewTokenRatio:
    """Share of the remaining output that admission reserves, as `tandem_engine.scheduler.retraction` keeps it."""

    config: SchedulerConfig
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.config.init_new_token_ratio

    def decay(self, steps: int) -> None:
        """After so many decode steps. Step by step, so that it is the engine's number."""
        least = self.config.min_new_token_ratio
        step = (self.config.init_new_token_ratio - least) / max(1, self.config.new_token_ratio_decay_steps)
        for _ in range(steps):
            if self.value == least:
                return
            self.value = max(least, self.value - step)

    def reset(self) -> None:
        self.value = self.config.init_new_token_ratio


@dataclass(kw_only=True, slots=True)
class _Pass:
    """One pass over the queue."""

    budget: int
    reserved: int
    computing: set[bytes] = field(default_factory=set)
    """Ends of what is being computed for others, as far as it is worth waiting for."""
    parts: list[PromptPart] = field(default_factory=list)


class ModelledScheduler:
    """Of one worker. `plan` a step, let it take its time, `end` it, and again.

    `config` gives chunk (`chunked_prefill_size`, of a step and of a prompt in it), rows, watermark and new token
    ratio. `on_cache_change` is called after blocks have entered or left the cache, but not for each chunk of a prompt,
    only for the first and the last: each call may cost a message to the router's index.
    """

    def __init__(
        self,
        *,
        name: str,
        cache: BlockCache,
        block_tokens: int,
        config: SchedulerConfig,
        on_cache_change: Callback,
        on_retracted: Callable[[Job], None],
        caches_outputs: bool = False,
    ) -> None:
        self.waiting: deque[Job] = deque()
        self.incoming: deque[Job] = deque()
        """Requests whose prompt is computed elsewhere: they do not wait for a prompt here."""
        self.retracted = 0
        """Times that a job gave its pages back."""
        self._name = name
        self._cache = cache
        self._block = block_tokens
        self._config = config
        # An engine's pool has one page more, for padding.
        self._watermark = int(config.watermark * (cache.capacity + 1))
        self._on_cache_change = on_cache_change
        self._on_retracted = on_retracted
        self._caches_outputs = caches_outputs
        self._ratio = NewTokenRatio(config=config)
        self._chunked: Job | None = None
        """The one whose prompt is partly computed."""
        self._finishing: list[Job] = []
        """Their prompts end with this step."""
        self._receiving: set[Job] = set()
        """They have pages, and wait for KV."""
        self._sending: set[Job] = set()
        """Their prompt is computed, and its pages wait for their transfer."""
        self._decoding: dict[Job, None] = {}
        """In the order in which they joined."""
        self._ends: list[tuple[int, int, Job, int]] = []
        """(Step of the last token, order, job, its `retractions`); old entries are dropped when they are due."""
        self._needs: list[tuple[int, int, Job, int]] = []
        """The same of the step that needs one more page."""
        self._steps = 0
        self._order = 0
        self._short_of_pages = False
        """The head of the queue waits for pages: each step may have enough of them."""

    @property
    def sequences(self) -> int:
        """Rows in use: decoding, or admitted and going to."""
        prompts = sum(job.output_tokens > 0 for job in self._prompts_under_way())
        return len(self._decoding) + len(self._receiving) + prompts

    @property
    def decoding(self) -> int:
        return len(self._decoding)

    @property
    def unfinished_tokens(self) -> int:
        """Of prompts in the step that runs, and of the one that is partly computed."""
        return sum(job.left for job in self._prompts_under_way())

    @property
    def computes_for_others(self) -> int:
        """Prompts that are being computed for another worker."""
        return sum(job.output_tokens == 0 for job in self._prompts_under_way())

    def _prompts_under_way(self) -> list[Job]:
        return self._finishing if self._chunked is None else [*self._finishing, self._chunked]

    # Steps

    def plan(self) -> Step | None:
        """What is computed next; None when nothing can be."""
        self._admit_incoming()
        before = self.retracted
        can_decode = self._make_room()
        self._short_of_pages = False
        parts = self._prompts(admit=not can_decode or self.retracted == before)
        rows = len(self._decoding) if can_decode else 0
        if not parts and not rows:
            return None
        count = 1 if parts or self._short_of_pages else self._alike()
        return Step(count=count, prompts=tuple(parts), rows=rows)

    def end(self, step: Step, count: int) -> StepEnd:
        """`count` of the steps have been computed. Calls nothing of the jobs."""
        if step.rows:
            self._ratio.decay(count)
            self._steps += count
        end = StepEnd()
        for part in step.prompts:
            self._computed(part, end)
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, job, retractions = heappop(self._ends)
            if job in self._decoding and job.retractions == retractions:
                self._release(job)
                end.ended.append(job)
        return end

    def received(self, job: Job) -> bool:
        """The KV of a job that got room has arrived, and so has its first token; True if it is its last."""
        self._receiving.discard(job)
        job.computed = job.target
        self._cache_whole_blocks(job, job.target)
        return self._first_token(job)

    def sent(self, job: Job) -> None:
        """A job without output here has been transferred."""
        self._sending.discard(job)
        self._free(job)

    # Room

    def _make_room(self) -> bool:
        """Retract until each decode has the page of its next token, and take the pages. False: not even one fits."""
        needy = self._needy()
        while len(needy) > self._cache.room:
            candidates = [*self._decoding]
            if self._chunked is not None and self._chunked.output_tokens:
                candidates.append(self._chunked)
            if len(candidates) == 1:
                self._put_off(needy)
                return False
            victim = max(candidates, key=lambda job: job.serial)
            self._retract(victim)
            needy = [job for job in needy if job is not victim]
        for job in needy:
            self._cache.take(1)
            job.private += 1
            self._need_from(job, self._steps + self._block)
        if needy:
            self._on_cache_change()
        return bool(self._decoding)

    def _needy(self) -> list[Job]:
        """Takes jobs that need a page now out of the heap."""
        found = []
        while self._needs and self._needs[0][0] <= self._steps:
            _, _, job, retractions = heappop(self._needs)
            if job in self._decoding and job.retractions == retractions:
                found.append(job)
        return found

    def _put_off(self, needy: Sequence[Job]) -> None:
        for job in needy:
            self._need_from(job, self._steps)

    def _need_from(self, job: Job, step: int) -> None:
        self._order += 1
        heappush(self._needs, (step, self._order, job, job.retractions))

    def _alike(self) -> int:
        """Steps until a sequence ends or needs a page."""
        until = self._next(self._ends)
        if self._needs:
            until = min(until, self._next(self._needs))
        return until - self._steps

    def _next(self, heap: list[tuple[int, int, Job, int]]) -> int:
        """Step of the first entry that still counts; one of `_ends` always does."""
        while heap and not (heap[0][2] in self._decoding and heap[0][2].retractions == heap[0][3]):
            heappop(heap)
        return heap[0][0] if heap else self._ends[0][0]

    def _retract(self, job: Job) -> None:
        self._ratio.reset()
        self.retracted += 1
        job.retractions += 1
        if job.joined is None:
            self._chunked = None
            self._cache_whole_blocks(job, job.computed)
        else:
            del self._decoding[job]
            passed = self._steps - job.joined
            self._cache_whole_blocks(job, job.target + passed)
            job.generated += passed
            job.joined = None
            job.chain = self._blocks(job, (job.prompt_tokens + job.generated) // self._block)
        self._free(job)
        self.waiting.appendleft(job)
        self._on_retracted(job)

    # Prompts

    def _prompts(self, *, admit: bool) -> list[PromptPart]:
        admit = admit and bool(self.waiting)
        going = _Pass(budget=self._config.chunked_prefill_size, reserved=self._reserved() if admit else 0)
        if self._chunked is not None and not self._resume(self._chunked, going):
            return going.parts
        if admit:
            going.computing = self._computing()
        while admit and self.waiting and going.budget and self._add(self.waiting[0], going):
            pass
        return going.parts

    def _resume(self, job: Job, going: _Pass) -> bool:
        tokens = min(going.budget, job.left)
        if not self._grow(job, job.computed + tokens):
            return False
        self._take_part(job, tokens, going)
        return True

    def _add(self, job: Job, going: _Pass) -> bool:
        """Whether the head of the queue was admitted."""
        crowded = self._holders() > 0
        if self._seats_taken() >= self._config.max_running_requests:
            return False
        if crowded and self._cache.room <= going.reserved:
            self._short_of_pages = True
            return False
        target = job.prompt_tokens + job.generated
        longest = (target - 1) // self._block
        matched = self._cache.match(job.chain[:longest])
        if self._waits_for_another(job, matched, going):
            return False
        tokens = min(going.budget, target - matched * self._block)
        whole = tokens == target - matched * self._block
        self._cache.hold(job.chain[:matched])
        if not (whole or self._chunked is None) or not self._fits(job, target, matched, crowded, going):
            # As in the engine, the attempt counts as a use of the prefix.
            self._cache.release(job.chain[:matched])
            return False
        self.waiting.popleft()
        self._begin(job, matched, target)
        granted = self._grow(job, job.computed + tokens)
        assert granted, f"pages for {tokens} tokens were counted and are not there"
        self._on_cache_change()
        self._take_part(job, tokens, going)
        # What it expects, in addition to what it has by now.
        going.reserved += max(0, self._expected(job, target, job.generated, self._ratio.value) - job.pages)
        return True

    def _fits(self, job: Job, target: int, matched: int, crowded: bool, going: _Pass) -> bool:
        """Next to what others are expected to need. Alone it may have all there is, and only its prompt counts."""
        ratio, watermark = (self._ratio.value, self._watermark) if crowded else (0.0, 0)
        missing = self._expected(job, target, job.generated, ratio) - matched
        if missing > self._cache.room - going.reserved - watermark:
            self._short_of_pages = True
            return False
        return True

    def _begin(self, job: Job, matched: int, target: int) -> None:
        if not job.retractions:
            job.matched = matched
            job.missing_tokens = target - matched * self._block
        job.target, job.computed, job.held, job.private = target, matched * self._block, matched, 0

    def _take_part(self, job: Job, tokens: int, going: _Pass) -> None:
        going.parts.append(PromptPart(job=job, tokens=tokens))
        going.budget -= tokens
        if tokens < job.left:
            self._chunked = job
        else:
            self._finishing.append(job)
            if self._chunked is job:
                self._chunked = None

    def _waits_for_another(self, job: Job, matched: int, going: _Pass) -> bool:
        """Whether what it needs next is being computed; if not, others may wait for it."""
        end = matched + ceil(WORTH_WAITING / self._block)
        length = job.prompt_tokens + job.generated
        if end * self._block > length or end > len(job.chain):
            return False
        if end * self._block <= length - 1 and job.chain[end - 1] in going.computing:
            return True
        going.computing.add(job.chain[end - 1])
        return False

    def _computing(self) -> set[bytes]:
        job = self._chunked
        if job is None:
            return set()
        end = self._cache.match(job.chain[: (job.target - 1) // self._block]) + ceil(WORTH_WAITING / self._block)
        return {job.chain[end - 1]} if end <= len(job.chain) else set()

    def _computed(self, part: PromptPart, end: StepEnd) -> None:
        job = part.job
        job.computed += part.tokens
        self._cache_whole_blocks(job, job.computed)
        if job.left:
            return
        self._finishing.remove(job)
        end.prompts.append(job)
        if not job.output_tokens:
            self._sending.add(job)
        elif self._first_token(job):
            end.ended.append(job)

    # Expectations

    def _expected(self, job: Job, tokens: int, generated: int, ratio: float) -> int:
        """Pages at its end. A prompt for another worker ends with its first token, which needs no KV here."""
        rest = ceil((job.output_tokens - generated) * ratio) if job.output_tokens else 0
        return ceil((tokens + rest) / self._block)

    def _reserved(self) -> int:
        """Pages that admitted jobs are expected to take beyond those they have."""
        ratio, reserved = self._ratio.value, 0
        if not self.waiting and not self.incoming:
            return 0
        for job in self._decoding:
            passed = self._steps - (job.joined or 0)
            expected = self._expected(job, job.target + passed + 1, job.generated + passed, ratio)
            reserved += max(0, expected - job.pages)
        if self._chunked is not None:
            job = self._chunked
            reserved += max(0, self._expected(job, job.target, job.generated, ratio) - job.pages)
        return reserved

    def _seats_taken(self) -> int:
        going = sum(job.output_tokens > 0 for job in self._finishing)
        return len(self._decoding) + len(self._receiving) + going + (self._chunked is not None)

    def _holders(self) -> int:
        chunked = self._chunked is not None
        return len(self._decoding) + len(self._receiving) + len(self._sending) + len(self._finishing) + chunked

    # Transfers

    def _admit_incoming(self) -> None:
        """Jobs whose prompt is computed elsewhere get pages for it, while running ones can spare them."""
        while self.incoming:
            job = self.incoming[0]
            if self._seats_taken() >= self._config.max_running_requests:
                return
            matched = self._cache.match(job.chain[: (job.prompt_tokens - 1) // self._block])
            missing = ceil(job.prompt_tokens / self._block) - matched
            spare = self._cache.room - self._reserved() - self._cache.idle_among(job.chain[:matched])
            if self.waiting:
                head = self.waiting[0]
                spare -= self._expected(head, head.prompt_tokens + head.generated, head.generated, self._ratio.value)
            if missing + len(self._receiving) > spare:
                return
            self.incoming.popleft()
            self._cache.hold(job.chain[:matched])
            self._begin(job, matched, job.prompt_tokens)
            self._grow(job, job.prompt_tokens)
            self._on_cache_change()
            self._receiving.add(job)
            assert job.on_room is not None, "only jobs that receive their prompt wait here"
            job.on_room()

    # Pages

    def _grow(self, job: Job, tokens: int) -> bool:
        """Pages for so many of its tokens, if they are there."""
        missing = ceil(tokens / self._block) - job.pages
        if missing > self._cache.room:
            return False
        if missing > 0:
            self._cache.take(missing)
            job.private += missing
        return True

    def _cache_whole_blocks(self, job: Job, tokens: int) -> None:
        whole = tokens // self._block
        if whole > job.held:
            self._cache.store(self._blocks(job, whole)[:whole], job.held)
            job.private -= whole - job.held
            job.held = whole
            if not job.left:
                self._on_cache_change()

    def _blocks(self, job: Job, count: int) -> Sequence[bytes]:
        """Digests of its first `count` blocks. Those that are not of the prompt alone are its own."""
        if count > len(job.chain):
            job.chain = [*job.chain, *self._own(job, len(job.chain), count)]
        return job.chain

    def _own(self, job: Job, first: int, stop: int) -> Iterator[bytes]:
        for number in range(first, stop):
            name = f"{self._name} {job.serial} {number}".encode()
            yield blake2b(name, digest_size=DIGEST_BYTES).digest()

    def _first_token(self, job: Job) -> bool:
        """It decodes from the next step on; True if this was its last token, and it is released."""
        job.generated += 1
        if job.generated == job.output_tokens:
            self._free(job)
            return True
        job.joined = self._steps
        self._decoding[job] = None
        self._order += 1
        heappush(self._ends, (self._steps + job.output_tokens - job.generated, self._order, job, job.retractions))
        self._need_from(job, self._steps + -job.target % self._block)
        return False

    def _release(self, job: Job) -> None:
        """A decoding job has its last token, which has no KV."""
        del self._decoding[job]
        if self._caches_outputs:
            self._cache_whole_blocks(job, job.prompt_tokens + job.output_tokens - 1)
        self._free(job)

    def _free(self, job: Job) -> None:
        self._cache.release(job.chain[: job.held])
        self._cache.give_back(job.private)
        job.held = job.private = 0
