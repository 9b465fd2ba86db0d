"""Requests wait here for their grammar, and hold up nobody.

    ingress ──begin──▶ compiled before: at once ────────────────────▶ the request has its `grammar`
                  └──▶ a job, shared by all who want the same grammar
                         poll ─▶ done: its requests go on, those that a stage keeps where they are
                              └▶ failed: its requests end with the reason

A request that waits for its grammar alone stands in `Queues.compiling`, where aborts, deadlines, the queue cap and
statistics find it [one-home]. A job that nobody waits for any more is cancelled, so pending jobs are bounded by the
queue.

With several ranks each compiles for itself, and all must let the same requests go in the same turn [least-of-ranks]:
`least` turns what this rank knows of each job, in the order they were begun, into what all ranks can act on. What is
kept of a job follows from that too, or the ranks would know different grammars; and so does when it is given up.
"""

import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import IntEnum

from tandem_engine.errors import EngineError, GrammarCompilerError, InvalidRequestError
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.messages.outputs import Finish
from tandem_engine.parallel.agreement import Least
from tandem_engine.sampling.grammar.backend import CompiledGrammar
from tandem_engine.sampling.grammar.compiler import Grammars
from tandem_engine.sampling.grammar.reasoning import BudgetedReasoning
from tandem_engine.scheduler.endings import Endings, error_finish
from tandem_engine.scheduler.grammar_progress import GRAMMAR_ENDED, GrammarProgress
from tandem_engine.scheduler.model_facts import ModelFacts
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request

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
    """One compilation and who waits for it."""

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
        """See to the grammar of a new request, before it has a home.

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
        """Once per turn: requests whose grammar is decided go on or end. True if there were any."""
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
                self._go_on(req, compiled)
            return
        error = _error(job, state)
        if isinstance(error, InvalidRequestError):
            self.grammars.keep_refusal(spec, error)
        for req in job.requests:
            self._end(req, error_finish(error))

    def _go_on(self, req: Request, compiled: CompiledGrammar) -> None:
        finish = self._start(req, compiled)
        if finish is None:
            self.queues.grammar_ready(req)
        else:
            self._end(req, finish)

    def _end(self, req: Request, finish: Finish) -> None:
        """End a request that has sampled nothing here, and have the other worker of a handoff told of it."""
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
