"""The scheduler: composes the parts and gives them one surface.

    add, abort ─▶ ingress ─▶ queues ─▶ planner ─▶ loop ─▶ executor
                     │         ▲                    │
                  stages ──────┘     stream ◀─ settlement

Life of a turn (`step`)
    1. deadlines that passed become wishes
    2. copies, reads from storage and grammars that are done; stages exchange messages and move requests
    3. the loop plans, launches and settles
    4. outputs leave, one delivery per client
    5. audit, when idle

One thread calls everything here. Nothing blocks but the wait for a launched step.

`for_stages` is what stages call back, from inside their own methods.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from tandem_engine.clock import Clock
from tandem_engine.config import SchedulerConfig
from tandem_engine.errors import DrainingError, EngineError
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.memory.conservation import ConservationReport
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.names import RequestId
from tandem_engine.parallel.agreement import Least
from tandem_engine.sampling.grammar.compiler import Grammars, NoGrammars
from tandem_engine.scheduler.deadlines import Deadlines
from tandem_engine.scheduler.departures import is_moving
from tandem_engine.scheduler.ended_log import EndedLog
from tandem_engine.scheduler.endings import error_finish
from tandem_engine.scheduler.model_facts import ModelFacts
from tandem_engine.scheduler.new_token_ratio import NewTokenRatio
from tandem_engine.scheduler.parts import Shared, make_parts
from tandem_engine.scheduler.policy.choose import make_policy
from tandem_engine.scheduler.policy.interface import Policy
from tandem_engine.scheduler.report import scheduler_stats
from tandem_engine.scheduler.speculation import Speculation
from tandem_engine.scheduler.stage import QueueStage
from tandem_engine.scheduler.stage_side import StageSide
from tandem_engine.scheduler.stop import DecodeText, StopRule
from tandem_engine.scheduler.stream import OutputStream, Sink
from tandem_engine.scheduler.tally import SchedulerStats

ABORTED = Finish(reason=FinishReason.ABORT)
TURNED_AWAY = error_finish(DrainingError("worker is draining and had not started the request"))
NOT_TAKEN = error_finish(DrainingError("worker is draining and no other worker had capacity for the request in time"))
OVERDUE = Finish(reason=FinishReason.ABORT, error="the deadline passed", code="deadline_exceeded")


class Scheduler:
    """Continuous batching over one executor and one KV memory."""

    def __init__(
        self,
        *,
        memory: KvMemory,
        executor: ModelExecutor,
        config: SchedulerConfig,
        model: ModelFacts,
        clock: Clock,
        sink: Sink,
        decode_text: DecodeText | None = None,
        policy: Policy | None = None,
        speculation: Speculation | None = None,
        session_pages: int = 0,
        stopwatch: Clock | None = None,
        grammars: Grammars | None = None,
        least: Least | None = None,
    ) -> None:
        """Compose a scheduler.

        Args:
            clock: what decisions go by.
            decode_text: turns output ids into text; without it requests with stop strings are refused.
            policy: takes the place of the one that `config` names.
            speculation: who drafts tokens; None decodes one at a time.
            session_pages: that may stay pinned between the turns of conversations.
            stopwatch: what durations are measured with where `clock` stands still during a turn, as the time
                that ranks agree on does. None measures with `clock`.
            grammars: who compiles them; without it requests with a grammar are refused.
            least: `Agreement.least` of the ranks that run in lock-step with this one, if there are others.
        """
        context_length = min(model.context_length, config.context_length)
        facts = replace(model, context_length=context_length)
        stopwatch = stopwatch or clock
        self._shared = shared = Shared(
            config=config,
            memory=memory,
            facts=facts,
            clock=clock,
            stopwatch=stopwatch,
            policy=policy or make_policy(config, memory=memory, clock=clock),
            speculation=speculation,
            stop=StopRule(model=facts, decode_text=decode_text),
            stream=OutputStream(sink=sink),
            ended=EndedLog(clock=stopwatch),
            ratio=NewTokenRatio(config=config),
        )
        self._parts = parts = make_parts(
            shared,
            executor,
            session_pages=session_pages,
            grammars=grammars or NoGrammars("this engine was built without grammars"),
            least=least or list,
            allow_stop_strings=decode_text is not None,
        )
        self.memory = memory
        self.config = config
        self.clock = clock
        self.tally = shared.tally
        self.ended = shared.ended
        self.queues = shared.queues
        self.sessions = parts.sessions
        self.for_stages = StageSide(shared=shared, parts=parts)
        self._stream = shared.stream
        self._ingress = parts.ingress
        self._loop = parts.loop
        self._pausing = parts.pausing
        self._departures = parts.departures
        self._deadlines = Deadlines()

    # The owner of the loop calls these.

    def attach(self, stage: QueueStage) -> None:
        """Add a queue stage. Stages are asked in the order in which they were attached."""
        self.queues.stages.append(stage)

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + max_tokens that is accepted: the context, or the pool if that is smaller."""
        return min(self._shared.facts.context_length, self._shared.capacity_tokens + 1)

    def add(self, message: GenerateRequest, client: bytes = b"") -> None:
        """Accept a request, or refuse it with an output that says why. Raises nothing for the client's fault.

        Refusals: invalid_request (with the field), queue_full and draining (both worth another attempt).
        A second request under a live rid is ignored.
        """
        if is_moving(message):
            # What was aborted for it has to be in the prefix cache before it is looked up there.
            self._loop.stand_still()
        req = self._ingress.add(message, client)
        if req is not None:
            self._deadlines.watch(req)
        self._stream.flush()

    def check(self, message: GenerateRequest) -> None:
        """Raise `InvalidRequestError` for a request that no state of this engine can ever serve. Adds nothing."""
        self._ingress.check(message)

    def abort(self, rid: RequestId) -> None:
        """Wish for the end of a request, wherever it is. Unknown ids are ignored [unknown-id-ignored]."""
        self._ingress.abort(rid, ABORTED)
        self._stream.flush()

    def abort_group(self, client: bytes, name: str) -> None:
        """Abort every request of one client's group. Unknown names are ignored."""
        self._ingress.abort_group(client, name, ABORTED)
        self._stream.flush()

    def abort_client(self, client: bytes) -> None:
        """Abort every request of a client that is gone."""
        for req in [req for req in self.queues.live() if req.client == client]:
            self.abort(req.rid)

    def step(self) -> bool:
        """One turn. True when something moved; False means that only a message or a deadline can change that."""
        self.tally.loops += 1
        before = self.tally.moves
        for req in self._deadlines.overdue(self.clock.now()):
            self._ingress.abort(req.rid, OVERDUE)
        self.sessions.sweep()
        polled = [self.memory.poll(), *(stage.poll() for stage in self.queues.stages), self._parts.prefetching.poll()]
        polled.append(self._parts.gate.poll())
        for req in self._departures.poll():
            self._ingress.abort(req.rid, NOT_TAKEN)
        if self._pausing.paused:
            self._loop.stand_still()
        else:
            self._loop.turn()
        self._stream.flush()
        idle = self.idle
        if idle:
            self._loop.interrupt()
        self._parts.health.after_turn(idle=idle)
        return any(polled) or self.tally.moves != before

    def wait_for_grammar(self, seconds: float) -> None:
        """For a loop that has nothing else to wait for: sleep until a grammar is compiled, at most `seconds`."""
        self._parts.gate.wait(seconds)

    def on_wait(self, answer_others: Callable[[], None]) -> None:
        """Have `answer_others` called now and then during a long step. It must not touch the scheduler."""
        self._loop.while_waiting = answer_others

    def on_hang(self, report: Callable[[float], None]) -> None:
        """Have `report` called, with the seconds waited, when a step is taken for hung."""
        self._loop.on_hang = report

    def drain(self) -> None:
        """Refuse new requests from now on, and those that have not begun; what has begun leaves, or finishes.

        Both are worth another attempt elsewhere. Turns of a session are not, so they finish too.
        """
        self._ingress.draining = True
        self.decode_elsewhere(wanted=True)
        for req in [*self.queues.live()]:
            if req.kv is None and req.swapped is None and req.session is None:
                self._ingress.abort(req.rid, TURNED_AWAY)

    def decode_elsewhere(self, *, wanted: bool, within_s: float = inf) -> None:
        """Whether running requests are asked to go on at other workers. They are not while nothing could be sent.

        Whom nobody has taken `within_s` seconds after that is ended here, as worth another attempt elsewhere.
        """
        self._departures.within_s = inf if self._ingress.draining else within_s
        self._departures.wanted = (wanted or self._ingress.draining) and bool(self.queues.stages)

    def abort_all(self) -> int:
        """Wish for the end of every request; returns how many there were."""
        live = list(self.queues.live())
        for req in live:
            self.abort(req.rid)
        return len(live)

    # The operator's orders. All take effect between two steps.

    @property
    def paused(self) -> bool:
        """Whether requests stand still."""
        return self._pausing.paused

    def pause(self, mode: PauseMode, *, refuse_new: bool = False) -> int:
        """Compute nothing until `resume`; returns how many requests the mode touched. See `pausing`.

        `refuse_new`: answer new requests with `PausedError` instead of letting them wait.
        """
        self._loop.stand_still()
        self._pausing.paused = True
        self._ingress.paused = refuse_new
        touched = 0
        if mode is PauseMode.ABORT:
            touched = self.abort_all()
            self._parts.planner.sweep()
        elif mode is PauseMode.RETRACT:
            touched = self._pausing.put_back_all()
        self._stream.flush()
        return touched

    def resume(self) -> None:
        """Go on. No-op when not paused."""
        self._pausing.paused = self._ingress.paused = False

    def stand_still(self) -> None:
        """Settle what is in flight and launch nothing: for changes that no step may see half done."""
        self._loop.stand_still()
        self._stream.flush()

    def require_flushable(self) -> None:
        """Raise `BusyError` while requests hold KV: `forget_kv` would leave it behind."""
        self._pausing.require_flushable()

    def forget_kv(self) -> None:
        """Empty the prefix cache, of what conversations have pinned too."""
        for stage in self.queues.stages:
            stage.forget_kv()
        self._pausing.forget_kv()

    def end_started(self, finish: Finish) -> int:
        """End every request that has begun as `finish` says, now; returns how many. The others wait on."""
        self._loop.stand_still()
        started = [req for req in self.queues.live() if req.has_begun]
        for req in started:
            self._ingress.abort(req.rid, finish)
        self._parts.planner.sweep()
        self._stream.flush()
        return len(started)

    def report_failure(self, error: EngineError) -> None:
        """Tell every client that `error` ended its request. For an engine that cannot go on: nothing is released."""
        finish = error_finish(error)
        for req in list(self.queues.live()):
            self._stream.send(req, finish=finish)
        self._stream.flush()

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, is in flight or is kept by a stage."""
        return not self.queues.requests and self._loop.in_flight is None and not self.queues.stage_keeps_any()

    def audit(self) -> ConservationReport:
        """The five sets of pages, and what is wrong with them."""
        return self._parts.health.audit()

    def stats(self) -> SchedulerStats:
        """Numbers for `messages.engine_stats.EngineStats`."""
        return scheduler_stats(self._shared, self._parts)

    @property
    def launched(self) -> int:
        """Steps launched since start."""
        return self.tally.launched
