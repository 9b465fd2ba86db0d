"""Structured output in the scheduler: requests wait for their grammar, and steps get their token masks.

    ingress ──begin──▶ compiled before ────────────────────────────▶ the request has its `grammar` at once
                  └──▶ a job, shared by all requests with the same grammar
                         poll ─▶ done: its requests continue, also those that a stage keeps
                              └▶ failed: its requests end with the reason

A request that waits only for its grammar is in `Queues.compiling`, where aborts, deadlines, the queue cap and
statistics find it [one-home]; it blocks no other request. A job without waiting requests is canceled, so the queue
bounds the pending jobs.

With several ranks each compiles for itself, and all must admit the same requests in the same iteration
[least-of-ranks]. `least` reduces what this rank has of each job, in the order they began, to what all ranks have. Which
grammars stay cached, and when a job is given up, follows from the reduced state, so it is the same on every rank.

`open_masks` and `fill_masks` fill the masks of a step after everything before it has completed, when each matcher has
seen all tokens of its request. A request that has finished, or finishes here because its grammar has, keeps masks that
allow every token: its tokens will be dropped.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate

from tandem_engine.base.errors import EngineError, GrammarCompilerError, InvalidRequestError
from tandem_engine.forward.batch import ALL_ALLOWED, TokenMasks
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.messages.outputs import Finish
from tandem_engine.parallel.agreement import Least
from tandem_engine.sampling.grammar.backend import Bits, CompiledGrammar, masks_for_run
from tandem_engine.sampling.grammar.compiler import Grammars
from tandem_engine.sampling.grammar.reasoning import BudgetedReasoning
from tandem_engine.scheduler.finishing import Endings, error_finish
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import GRAMMAR_ENDED, GrammarProgress, Request
from tandem_engine.scheduler.stop import ModelFacts

logger = logging.getLogger(__name__)


class JobState(IntEnum):
    """What is known of a compilation. The least of several ranks' is what all can act on."""

    PENDING = 0
    FAILED = 1
    """For a reason of ours: nothing is kept."""
    REFUSED = 2
    """The grammar is wrong, or costs too much."""
    READY = 3


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One compilation and the requests that wait for it."""

    future: Future[CompiledGrammar]
    requests: list[Request]

    @property
    def state(self) -> JobState:
        if not self.future.done():
            return JobState.PENDING
        error = self.future.exception()
        if error is None:
            return JobState.READY
        return JobState.REFUSED if isinstance(error, InvalidRequestError) else JobState.FAILED


@dataclass(kw_only=True, slots=True)
class GrammarGate:
    """Scheduler thread only."""

    grammars: Grammars
    queues: Queues
    endings: Endings
    model: ModelFacts
    least: Least = list
    jobs: dict[GrammarSpec, Job] = field(default_factory=dict)
    """In the order they were begun."""

    def check(self, spec: GrammarSpec | None) -> None:
        """Raise `InvalidRequestError` for a grammar that is known to fail, before anything is done for its request."""
        if spec is not None:
            self.grammars.find(spec)

    def begin(self, req: Request) -> Finish | None:
        """Start on the grammar of a new request, before it is in a queue.

        Returns how the request ends if that is known at once: its resumed output is complete, or breaks the grammar.
        """
        spec = req.sampling.grammar
        if spec is None:
            return None if req.sampling.reasoning_budget is None else self._start(req, None)
        compiled = self.grammars.find(spec)
        if compiled is not None:
            return self._start(req, compiled)
        if spec in self.jobs:
            self.jobs[spec].requests.append(req)
        else:
            self.jobs[spec] = Job(future=self.grammars.compile(spec), requests=[req])
        return None

    def poll(self) -> bool:
        """Once per iteration: requests whose job is over continue or end. True if there were any."""
        self.grammars.acknowledge()
        if not self.jobs:
            return False
        self._give_up_unwanted()
        states = self.least([job.state for job in self.jobs.values()])
        decided = [(spec, state) for spec, state in zip(self.jobs, states, strict=True) if state != JobState.PENDING]
        for spec, state in decided:
            self._decide(spec, self.jobs.pop(spec), JobState(state))
        return bool(decided)

    def wait(self, seconds: float) -> None:
        """Sleep until something is compiled, at most `seconds`. Returns at once when nothing is being compiled."""
        wait([job.future for job in self.jobs.values()], timeout=seconds, return_when="FIRST_COMPLETED")

    def _give_up_unwanted(self) -> None:
        """Forget jobs whose requests have all ended, whether their compilation can still be called off or not."""
        for spec, job in [*self.jobs.items()]:
            job.requests = [req for req in job.requests if req.finished is None]
            if not job.requests:
                job.future.cancel()
                del self.jobs[spec]

    def _decide(self, spec: GrammarSpec, job: Job, state: JobState) -> None:
        if state is JobState.READY:
            compiled = job.future.result()
            self.grammars.keep(spec, compiled)
            for req in job.requests:
                self._continue_with(req, compiled)
            return
        error = _error(job, state)
        if isinstance(error, InvalidRequestError):
            self.grammars.keep_refusal(spec, error)
        for req in job.requests:
            self._end(req, error_finish(error))

    def _continue_with(self, req: Request, compiled: CompiledGrammar) -> None:
        finish = self._start(req, compiled)
        if finish is None:
            self.queues.ready(req)
        else:
            self._end(req, finish)

    def _end(self, req: Request, finish: Finish) -> None:
        """End a request that has sampled nothing here, and notify the other worker of a handoff."""
        if req.rid not in self.queues.requests:
            self._end_in_stage(req, finish)
            return
        self.endings.finish(req, req.to_finish or finish)
        for stage in self.queues.stages:
            stage.aborted(req)

    def _end_in_stage(self, req: Request, finish: Finish) -> None:
        for stage in self.queues.stages:
            if stage.abort(req.rid, finish):
                return

    def _start(self, req: Request, compiled: CompiledGrammar | None) -> Finish | None:
        """Give `req` its grammar, behind the reasoning if that has a budget, and let it follow what was generated
        elsewhere."""
        req.grammar = GrammarProgress.start(self._budgeted(req, compiled))
        try:
            req.grammar.catch_up(req.output_ids)
        except InvalidRequestError as error:
            return error_finish(error)
        return GRAMMAR_ENDED if req.grammar.matcher.ended else None

    def _budgeted(self, req: Request, compiled: CompiledGrammar | None) -> CompiledGrammar:
        budget = req.sampling.reasoning_budget
        if budget is not None:
            return BudgetedReasoning.of(
                budget, compiled, vocab_size=self.model.vocab_size, eos_token_ids=self.model.eos_token_ids
            )
        assert compiled is not None, f"request {req.rid} has no grammar and no budget"
        return compiled


def _error(job: Job, agreed: JobState) -> EngineError:
    """Why `job` ends without a grammar, on this rank or on another."""
    if job.state is not agreed:
        why = "on another rank of this engine"
        if agreed is JobState.REFUSED:
            return InvalidRequestError(f"the grammar was refused {why}", param="grammar")
        return GrammarCompilerError(f"the grammar compiler failed {why}")
    error = job.future.exception()
    if isinstance(error, EngineError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return GrammarCompilerError(f"the grammar compiler raised {type(error).__name__}")


def open_masks(samplers: Sequence[Request], constrained: Sequence[int], draft_lens: Sequence[int]) -> TokenMasks | None:
    """Masks for the samplers at `constrained`, those with a grammar or a budget; None for the others.

    Each has one for every row of sampling that is its own: one more than it has drafts. `draft_lens` are those of all
    samplers, () without drafts.
    """
    if not constrained:
        return None
    words = max(_progress(samplers[index]).compiled.words for index in constrained)
    if not draft_lens:
        return TokenMasks.open(tuple(constrained), words)
    starts = [*accumulate((drafts + 1 for drafts in draft_lens), initial=0)]
    rows = tuple(row for index in constrained for row in range(starts[index], starts[index + 1]))
    return TokenMasks.open(rows, words)


def fill_masks(masks: TokenMasks, runs: Iterable[tuple[Request, Sequence[int]]]) -> None:
    """Fill and release the masks of a step that is the only one in flight, or about to be launched.

    `runs` are its samplers with their drafts. Those that cannot continue get a pending finish, which settlement of this
    step applies before it reads their tokens.
    """
    bits: Bits = masks.bitmask.numpy()
    start = 0
    for req, drafts in runs:
        if not req.sampling.masked:
            continue
        stop = start + 1 + len(drafts)
        if req.finished is None and req.to_finish is None:
            req.to_finish = _fill(req, drafts, bits[start:stop])
        start = stop
    assert start == len(bits), f"{start} masks filled of {len(bits)}"
    masks.release()


def _progress(req: Request) -> GrammarProgress:
    assert req.grammar is not None, f"request {req.rid} samples without its grammar"
    return req.grammar


def _fill(req: Request, drafts: Sequence[int], bits: Bits) -> Finish | None:
    """The masks of the next tokens of `req`, or how it ends."""
    grammar = _progress(req)
    try:
        grammar.catch_up(req.output_ids)
    except InvalidRequestError as error:
        return error_finish(error)
    if grammar.matcher.ended:
        return GRAMMAR_ENDED
    known = grammar.compiled.words
    written = masks_for_run(grammar.matcher, drafts, bits[:, :known])
    bits[:written, known:] = 0
    problem = grammar.matcher.problem
    if written and not grammar.matcher.ended:
        bits[written:] = ALL_ALLOWED
        if problem is not None:
            # A guess ran into it. The output may never go there.
            grammar.start_over(req.output_ids)
        return None
    bits[:] = ALL_ALLOWED
    if problem is None:
        return GRAMMAR_ENDED
    return error_finish(grammar.not_followed())
