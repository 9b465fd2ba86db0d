"""The scheduler: composes the parts and gives them one surface.

    add, abort ─▶ ingress ─▶ queues ─▶ planner ─▶ loop ─▶ executor
                     │         ▲                    │
                  stages ──────┘     stream ◀─ settlement

One iteration (`step`)
    1. deadlines that passed become pending finishes
    2. completed copies, reads from storage and grammars; stages exchange messages and move requests
    3. the loop plans, launches and settles
    4. outputs leave, one delivery per client
    5. audit, when idle

One thread calls everything here. Only the wait for a launched step blocks.

Stages call back through `for_stages` (`StageSide`), from inside their own methods:

    admit_prebuilt, finish    for a request that `accept` kept; each takes it over
    release, finish           for one that `prefill_settled` kept: its KV was sent, or it failed

The other methods of `StageSide` limit what a stage may reserve of memory and slots that requests of the scheduler need.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import DrainingError, EngineError
from tandem_engine.base.names import RequestId
from tandem_engine.config import SchedulerConfig
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.memory.audit import ConservationReport
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.stats import SpeculationStats
from tandem_engine.parallel.agreement import Least
from tandem_engine.sampling.grammar.compiler import Grammars, NoGrammars
from tandem_engine.scheduler.components import SchedulerParts, Shared, make_parts
from tandem_engine.scheduler.counters import Phase, SchedulerStats
from tandem_engine.scheduler.finishing import Deadlines, EndedLog, Steps, error_finish
from tandem_engine.scheduler.gates.adapters import AdapterShelf, FixedShelf, Usage
from tandem_engine.scheduler.migration import is_moving
from tandem_engine.scheduler.output_stream import OutputStream, Sink
from tandem_engine.scheduler.policies import Policy, make_policy
from tandem_engine.scheduler.prefill_adder import OvertakenReserve, expected_pages, overtaken_reserve
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.retraction import NewTokenRatio
from tandem_engine.scheduler.speculation import Speculation
from tandem_engine.scheduler.stage import QueueStage
from tandem_engine.scheduler.stop import DecodeText, ModelFacts, StopRule


def scheduler_stats(shared: Shared, parts: SchedulerParts) -> SchedulerStats:
    """As it is now."""
    tally = shared.tally
    queues = shared.queues
    return SchedulerStats(
        loop_count=tally.loops,
        running=len(queues.requests) - queues.without_memory,
        waiting=queues.num_waiting,
        waiting_tokens=queues.waiting_tokens(),
        oldest_wait_s=queues.oldest_wait(shared.clock.now()),
        prefill_tokens_per_s=tally.prefill_tokens_per_s,
        decode_step_s=tally.decode_step_s,
        prompt_tokens_total=tally.prompt_tokens,
        cached_tokens_total=tally.cached_tokens,
        output_tokens_total=tally.output_tokens,
        requests_total=tally.requests,
        aborted_total=tally.aborted,
        failed_total=tally.failed,
        refused_total=tally.refused,
        retracted_total=tally.retracted,
        preempted_total=tally.preempted,
        head_waits=parts.planner.head_waits.value if len(queues.waiting) else "",
        swapped=len(queues.swapped),
        swapped_out_total=tally.swapped_out,
        swapped_in_total=tally.swapped_in,
        swap_misses_total=tally.swap_misses,
        host_cached_tokens_total=tally.host_cached_tokens,
        disk_cached_tokens_total=tally.disk_cached_tokens,
        unusable_tokens_total=tally.unusable_tokens,
        engine_errors_total=tally.engine_errors,
        poison_requests_total=tally.poison_requests,
        corrupted_requests_total=tally.corrupted,
        audit_failures_total=tally.audit_failures,
        overlap_hidden_s=tally.overlap_hidden_s,
        schedule_s=tally.schedule_s,
        speculation=_speculation_stats(shared.speculation),
        plan_s=tally.spent_s[Phase.PLAN],
        launch_s=tally.spent_s[Phase.LAUNCH],
        settle_s=tally.spent_s[Phase.SETTLE],
        wait_s=tally.spent_s[Phase.WAIT],
        paused=parts.pausing.paused,
        leaving=sum(1 for _ in parts.departures.leaving()),
        step_base_s=tally.step_base_s,
        step_fit=parts.loop.settlement.step_times.report(),
        step_fit_errors_total=parts.loop.settlement.step_times.errors,
    )


def _speculation_stats(speculation: Speculation | None) -> SpeculationStats | None:
    return None if speculation is None else speculation.tally.stats(speculation.proposer.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSide:
    """One per scheduler."""

    shared: Shared
    parts: SchedulerParts

    @property
    def memory(self) -> KvMemory:
        return self.shared.memory

    @property
    def clock(self) -> Clock:
        """What decisions go by."""
        return self.shared.clock

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.shared.facts.vocab_size

    @property
    def launched(self) -> int:
        """Steps launched since start."""
        return self.shared.tally.launched

    @property
    def step_in_flight(self) -> int | None:
        """Newest launched step that has not settled: what freed memory has to wait for."""
        return self.shared.steps.newest_in_flight

    def admit_prebuilt(self, req: Request) -> None:
        """`req` joins the running batch at the next plan; the stage gives it up.

        The stage has set `req.kv`, with KV of all tokens but the newest committed; at least one token in
        `req.output_ids`; and `req.streamed`, those that another worker sends to the client. `req.transfer`
        goes out with the next output. An output that is complete already (`stop_of`) belongs to `finish`.
        """
        assert req.output_ids, f"prebuilt request {req.rid} has no token to continue from"
        kv = req.held_kv
        assert kv.committed_len == req.seq_len - 1, (
            f"prebuilt request {req.rid} of {req.seq_len} tokens has KV of {kv.committed_len}"
        )
        assert req.remaining_tokens > 0, f"prebuilt request {req.rid} has its {len(req.output_ids)} tokens already"
        req.extend_target = req.launched_len = kv.committed_len
        self.shared.queues.take_over(req)
        if req.to_finish is not None:
            self.shared.queues.to_finish.append(req)

    def stop_of(self, req: Request) -> Finish | None:
        """How the newest token of `req.output_ids` ends the output, None if it does not."""
        *outputs, newest = req.output_ids
        cut = self.shared.stop.cut_at_stop(req.sampling, prompt_len=req.prompt_len, outputs=outputs, run=(newest,))
        return cut.finish

    def release(self, req: Request, *, checkpoint: bool = True) -> None:
        """Give back row and pages of a request that a stage keeps. The only way to do so; no-op without KV.

        `checkpoint` leaves its settled whole pages in the prefix cache. The client is not notified.
        """
        self.parts.endings.release(req, checkpoint=checkpoint)
        self.parts.sessions.give_up_turn(req)
        self.shared.queues.leave_group(req)
        self.shared.ended.note(req, None)

    def finish(self, req: Request, finish: Finish, *, checkpoint: bool = True) -> None:
        """End a request that a stage keeps: release it, notify the client, call `aborted` if it failed."""
        self.parts.endings.finish(req, finish, checkpoint=checkpoint)

    def spare_pages(self) -> int:
        """Free and evictable pages beyond what admitted requests and the head of the queue are expected to take.

        May be negative. A stage that reserves pages for requests to come stays within it, so that it
        neither pushes running requests into retraction nor starves the queue.
        """
        spare = self.memory.available_pages() - self.parts.planner.reserved_pages()
        head = self.shared.queues.head
        if head is not None:
            spare -= expected_pages(self.memory, head, head.seq_len, self.shared.ratio.value)
        return spare

    def overtaken_reserve(self, req: Request) -> OvertakenReserve:
        """What `req`, for which a stage reserves memory, has to leave to prompts that other workers wait for."""
        return overtaken_reserve(self.memory, self.shared.queues, req)

    def unpin_idle_session(self) -> bool:
        """Make pages evictable that only wait for a next turn. False when there are none."""
        return self.parts.sessions.unpin_idle_session()

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        """See `Policy.next_outside`."""
        return self.shared.policy.next_outside(requests)

    def spare_requests(self) -> int:
        """Requests that the running batch can still take. May be negative. A stage counts its own on top."""
        queues = self.shared.queues
        taken = len(queues.running) + len(queues.parked()) + (queues.chunked is not None)
        taken += sum(1 for _ in self.parts.isolation.suspects())
        return self.shared.config.max_running_requests - taken


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
        shelf: AdapterShelf | None = None,
        least: Least | None = None,
    ) -> None:
        """Compose a scheduler.

        Args:
            clock: what decisions go by.
            decode_text: turns output ids into text; without it requests with stop strings are refused.
            policy: takes the place of the one that `config` names.
            speculation: Drafts tokens; None decodes one at a time.
            session_pages: that may stay pinned between the turns of conversations.
            stopwatch: what durations are measured with where `clock` stands still during a turn, as the time
                that ranks agree on does. None measures with `clock`.
            grammars: Compiles them; without it requests with a grammar are rejected.
            shelf: Loads adapters that requests need; without it those in `model` are all there are.
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
            shelf=shelf or FixedShelf(facts.adapter_slots),
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
        """Add a queue stage. Stages are called in the order in which they were attached."""
        self.queues.stages.append(stage)

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + max_tokens that is accepted: the context, or the pool if that is smaller."""
        return min(self._shared.facts.context_length, self._shared.capacity_tokens + 1)

    def add(self, message: GenerateRequest, client: bytes = b"") -> None:
        """Accept a request, or reject it with an output that has the reason. Raises nothing for the client's fault.

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
        """Mark a request for abort, wherever it is. Unknown ids are ignored [unknown-id-ignored]."""
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
        polled += [self._parts.gate.poll(), self._parts.adapters.poll()]
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
        """Whether running requests migrate to other workers. They do not while nothing could be sent.

        A request that no worker has taken `within_s` seconds after that ends here, with a retryable error.
        """
        self._departures.within_s = inf if self._ingress.draining else within_s
        self._departures.wanted = (wanted or self._ingress.draining) and bool(self.queues.stages)

    def abort_all(self) -> int:
        """Mark every request for abort; returns how many there were."""
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
        """Resume. No-op when not paused."""
        self._pausing.paused = self._ingress.paused = False

    def stand_still(self) -> None:
        """Settle what is in flight and launch nothing: for changes that no step may see half done."""
        self._loop.stand_still()
        self._stream.flush()

    def require_flushable(self) -> None:
        """Raise `BusyError` while requests hold KV: `forget_kv` would not drop it."""
        self._pausing.require_flushable()

    def forget_kv(self) -> None:
        """Empty the prefix cache, of what conversations have pinned too."""
        for stage in self.queues.stages:
            stage.forget_kv()
        self._pausing.forget_kv()

    def end_started(self, finish: Finish) -> int:
        """End every started request with `finish`, now; returns how many. The others keep waiting."""
        self._loop.stand_still()
        started = [req for req in self.queues.live() if req.has_begun]
        for req in started:
            self._ingress.abort(req.rid, finish)
        self._parts.planner.sweep()
        self._stream.flush()
        return len(started)

    def report_failure(self, error: EngineError) -> None:
        """Report `error` to every client as the end of its request. The engine cannot continue; nothing is released."""
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
        """Numbers for `messages.stats.EngineStats`."""
        return scheduler_stats(self._shared, self._parts)

    def adapter_usage(self) -> Usage:
        """Requests by adapter."""
        return self._parts.adapters.usage()

    @property
    def waiting_for_adapter(self) -> int:
        """Requests whose adapter is not in memory."""
        return sum(map(len, self._parts.adapters.waiting.values()))

    @property
    def launched(self) -> int:
        """Steps launched since start."""
        return self.tally.launched

    @property
    def steps(self) -> Steps:
        """Counts of launched and completed steps."""
        return self._shared.steps
