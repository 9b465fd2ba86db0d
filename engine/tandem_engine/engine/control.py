"""Commands of an administrator: what each does to the engine, and its reply.

    abort, flush, pause, resume    at once, between two steps
    decode elsewhere               at once; running requests then migrate a few at a time
    profile                        replied to when it starts or stops; it also ends by itself
    reload                         replied to when the new weights serve, or cannot; requests continue until then
    load an adapter                replied to when new requests may have it, or it cannot be loaded
    unload an adapter              at once for new requests; those that have it continue with it

Everything here runs on the scheduler thread.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from tandem_engine.base.errors import EngineError
from tandem_engine.base.names import RequestId
from tandem_engine.engine import Engine
from tandem_engine.engine.adapter_orders import ChangedAdapter
from tandem_engine.engine.reload import Reloaded
from tandem_engine.executor.profiler import StepProfiler
from tandem_engine.messages.control import (
    AbortRequests,
    DecodeElsewhere,
    FlushCache,
    LoadAdapter,
    OperatorOrder,
    OrderAtOnce,
    OrderDone,
    OrderRefused,
    PauseGeneration,
    ReloadWeights,
    ResumeGeneration,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)
Answer = Callable[[OrderDone | OrderRefused], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done, in a sentence and in figures."""

    message: str
    figures: dict[str, int | str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Operations:
    """Carries out operators' orders on one engine."""

    engine: Engine
    profiler: StepProfiler
    answer: Answer
    changed: Callable[[], None]
    """The engine has another `compat_hash` or other adapters: notify the component that describes it to others."""
    reloading: Future[Reloaded] | None = None
    reload_nonce: int = 0
    """Of the order that `reloading` will answer."""
    changing: list[tuple[LoadAdapter | UnloadAdapter, Future[ChangedAdapter]]] = field(default_factory=list)
    """Orders about adapters that are not answered."""

    def handle(self, order: OperatorOrder) -> None:
        """Carry out `order` and answer it, now or later."""
        logger.info("command: %s", order)
        try:
            if isinstance(order, ReloadWeights):
                self.reloading = self.engine.reload(order.path)
                self.reload_nonce = order.nonce
                return
            if isinstance(order, LoadAdapter | UnloadAdapter):
                self.changing.append((order, self.engine.change_adapters(order)))
                self._answer_changes()
                return
            outcome = self._carry_out(order)
        except EngineError as error:
            self._refuse(order.nonce, error)
            return
        self.answer(OrderDone(nonce=order.nonce, message=outcome.message, figures=outcome.figures))

    def poll(self) -> None:
        """Once a turn: end what ends by itself."""
        if self.profiler.running:
            self._poll_profile()
        if self.reloading is not None and self.reloading.done():
            reloading, self.reloading = self.reloading, None
            self._answer_reload(reloading)
        self._answer_changes()

    def close(self) -> None:
        """End what is under way: a trace is written. The engine ends a reload when it closes."""
        if self.profiler.running:
            self.profiler.stop()

    def _carry_out(self, order: OrderAtOnce) -> Outcome:
        match order:
            case AbortRequests(rid=rid):
                return self._abort(rid)
            case FlushCache():
                return Outcome("the prefix cache is empty", {"pages": self.engine.flush_cache()})
            case PauseGeneration() | ResumeGeneration():
                return self._pause_or_resume(order)
            case DecodeElsewhere():
                return self._decode_elsewhere(order)
            case StartProfile() | StopProfile():
                return self._profile(order)

    def _pause_or_resume(self, order: PauseGeneration | ResumeGeneration) -> Outcome:
        if isinstance(order, ResumeGeneration):
            self.engine.resume()
            return Outcome("resumed")
        # Other workers may serve what would only wait here.
        self.engine.pause(order.mode, refuse_new=True)
        live = sum(1 for _ in self.engine.scheduler.queues.live())
        return Outcome(f"paused ({order.mode})", {"requests": live})

    def _profile(self, order: StartProfile | StopProfile) -> Outcome:
        if isinstance(order, StopProfile):
            return Outcome("written", {"path": str(self.profiler.stop())})
        launched = self.engine.scheduler.launched
        trace = self.profiler.start(launched=launched, steps=order.steps, seconds=order.seconds)
        return Outcome("recording", {"path": str(trace)})

    def _decode_elsewhere(self, order: DecodeElsewhere) -> Outcome:
        self.engine.decode_elsewhere(wanted=order.wanted, within_s=order.within_s)
        leaving = self.engine.scheduler.stats().leaving
        return Outcome("running requests leave" if order.wanted else "running requests stay", {"leaving": leaving})

    def _abort(self, rid: str | None) -> Outcome:
        scheduler = self.engine.scheduler
        if rid is None:
            live = sum(1 for _ in scheduler.queues.live())
            self.engine.abort_all()
            return Outcome("aborting every request", {"requests": live})
        known = any(req.rid == rid for req in scheduler.queues.live())
        self.engine.abort(RequestId(rid))
        return Outcome("aborting" if known else "no request of this id is here", {"requests": int(known)})

    def _answer_reload(self, reloading: Future[Reloaded]) -> None:
        try:
            reloaded = reloading.result()
        except EngineError as error:
            self._refuse(self.reload_nonce, error)
            return
        self.changed()
        message = f"serving the weights in {reloaded.path}"
        figures: dict[str, int | str] = {"fingerprint": reloaded.fingerprint, "ended": reloaded.ended}
        self.answer(OrderDone(nonce=self.reload_nonce, message=message, figures=figures))

    def _answer_changes(self) -> None:
        done = [each for each in self.changing if each[1].done()]
        if done:
            self.changing = [each for each in self.changing if each not in done]
        for order, change in done:
            self._answer_change(order, change)

    def _answer_change(self, order: LoadAdapter | UnloadAdapter, change: Future[ChangedAdapter]) -> None:
        try:
            adapter, former = change.result()
        except EngineError as error:
            self._refuse(order.nonce, error)
            return
        self.changed()
        figures: dict[str, int | str] = {"digest": adapter.digest}
        message = f"adapter {order.name} serves no new request"
        if isinstance(order, LoadAdapter):
            message = f"serving adapter {adapter.name}"
            figures |= {"rank": adapter.rank, "root": adapter.root, "size": adapter.size, "former": former}
        self.answer(OrderDone(nonce=order.nonce, message=message, figures=figures))

    def _poll_profile(self) -> None:
        try:
            self.profiler.poll(self.engine.scheduler.launched)
        except EngineError as error:
            # No caller waits for this answer: the order was answered when the trace began.
            logger.error("%s", error)

    def _refuse(self, nonce: int, error: EngineError) -> None:
        logger.warning("command rejected: %s", error)
        self.answer(OrderRefused(nonce=nonce, code=error.code, message=str(error)))
