"""The connection to an engine: one per worker incarnation, shared by all requests (`engine_pool`).

    1. opened    a ping is sent at once
    2. proven    the incarnation has answered a ping. The socket is authenticated, so the worker belongs to the
                 deployment, whatever Redis contains. Any message renews the proof for `PROOF_S`; after that a request
                 waits for an answer first (`prove`)
       silent    it was asked and has not answered: no request should choose it. A worker that is connected ahead is
                 silent from the start, one that a request waits for when that has given up
    3. in use    a reader passes each output to the listener of its rid; unknown rids are ignored
                 [unknown-id-ignored]. One ping is sent per interval while there are requests, for `PROOF_S` after the
                 last one, and always to a worker that is `watched`
    4. dead      the socket closed, pings stayed unanswered, a message could not be decoded, or code of the connection
                 failed. Router and listeners are notified at once, and the socket is closed. `Revival` then probes the
                 worker, unless it sent such a message
       reopened  the socket closed while idle. Firewalls and restarted networks close idle connections, so one new
                 connection is tried; a dead engine refuses it

Silence is measured in unanswered pings, not in seconds. An event loop that was itself blocked sends none, and an engine
with a long queue still answers them, so both count as alive.

`Revival` probes workers whose connection was lost, because a network may fail while the worker runs:

    1. lost      a separate connection is opened, repeatedly while it is refused
    2. probing   a ping every `ask_every_s`, for `ask_for_s`: a stopped process may continue
    3. answered  by the same incarnation: it is reported at once and may be chosen again
       silent    the registry decides (`router.membership`)

The pause before the next probe doubles when a connection breaks again soon after an answer.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import WireError
from tandem_engine.ipc.async_channels import AsyncDealerChannel
from tandem_engine.ipc.channels import MAX_PER_RECEIVE, IpcContext
from tandem_engine.messages.outputs import EngineReply, OutputBatch, Pong, Taken, TokenOutput
from tandem_engine.messages.requests import AbortRequest, CloseSession, EngineRequest, GenerateRequest, Ping
from tandem_services.common.engine_ping import ASK_EVERY_S, answers
from tandem_services.gateway.dispatch.reading_pace import ReadingPace
from tandem_services.router.decision import WorkerView

logger = logging.getLogger(__name__)

STEADY_S = 10.0
"""A line that has held for this long after an answer is as good as one that never broke."""

FIRST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Answered:
    """The last answer of a worker that had been lost."""

    at: float
    pause_s: float
    """How long it had not been probed before."""


@dataclass(kw_only=True, slots=True)
class Revival:
    """One per model service. Belongs to one event loop."""

    context: IpcContext
    clock: Clock
    on_alive: Callable[[str], None]
    """Called with the incarnation of every worker that has answered."""
    ask_every_s: float = ASK_EVERY_S
    ask_for_s: float = 10.0
    _asking: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    _answered: dict[str, _Answered] = field(default_factory=dict)

    @property
    def asking(self) -> frozenset[str]:
        """Incarnations that have not answered yet."""
        return frozenset(name for name, task in self._asking.items() if not task.done())

    def ask(self, worker: WorkerView) -> None:
        """`worker` was lost: probe it. Does nothing while it is being probed already."""
        if worker.incarnation in self.asking:
            return
        self._asking = {name: task for name, task in self._asking.items() if not task.done()}
        self._asking[worker.incarnation] = asyncio.create_task(self._ask(worker))

    def pause_s(self, incarnation: str) -> float:
        """The pause before this worker is probed: none, unless its connection broke soon after an answer."""
        now = self.clock.now()
        self._answered = {name: answer for name, answer in self._answered.items() if now - answer.at < STEADY_S}
        answer = self._answered.get(incarnation)
        return 0.0 if answer is None else min(max(FIRST_PAUSE_S, 2 * answer.pause_s), STEADY_S)

    def close(self) -> None:
        """Stop all probes. Idempotent."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, worker: WorkerView) -> None:
        incarnation, pause_s = worker.incarnation, self.pause_s(worker.incarnation)
        await asyncio.sleep(pause_s)
        if await answers(
            self.context,
            worker.request_endpoint,
            incarnation,
            within_s=self.ask_for_s,
            ask_every_s=self.ask_every_s,
        ):
            self._answered[incarnation] = _Answered(self.clock.now(), pause_s)
            logger.info("worker answers again", extra={"fields": {"worker": incarnation}})
            self.on_alive(incarnation)


UNREADABLE = "unreadable message"
LOST = "connection lost"
FAILED = "failed here"
"""An exception of the gateway's own code: the worker may be well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessTiming:
    """When a silent engine is given up."""

    ping_interval_s: float = 1.0
    unanswered_pings: int = 3


PROOF_S = 10.0
"""How long a message of an engine proves that it is there, at least."""

MAX_DELIVERED = 256
"""Outputs, about two milliseconds' worth, after which the reader of a connection lets the event loop serve others."""

MAX_TOGETHER = 4096
"""The same while many requests wait to start: it reads seldom then, and tokens that are read together cost less."""


class Pouring(Protocol):
    """Keeps tokens that come together, so that they leave together."""

    def pour(self, at: float) -> None:
        """Pass on what is kept; the last of it came at `at`, on the gateway's clock. Idempotent; must not block or
        raise."""
        ...


class Listener(Protocol):
    """Where the outputs of one rid go. Called on the event loop; must not block or raise."""

    def on_taken(self) -> None:
        """The engine has the request in hand."""
        ...

    def on_output(self, output: TokenOutput) -> Pouring | None:
        """Returns an object to `pour` when the messages that have come are all read."""
        ...

    def on_lost(self) -> None:
        """The engine is dead. Called once, after the last output."""
        ...


class EngineConnection:
    """The socket to one incarnation. `on_dead` is called once, while the listeners are still there.

    Raises `WireError` for an endpoint that cannot be one: it came from the registry.
    """

    def __init__(
        self,
        worker: WorkerView,
        context: IpcContext,
        timing: LivenessTiming,
        on_dead: Callable[["EngineConnection", str], None],
        clock: Clock,
        *,
        trusted: bool = False,
        silent: bool = False,
        on_silence: Callable[["EngineConnection"], None] | None = None,
        pace: ReadingPace | None = None,
    ) -> None:
        """`trusted`: the incarnation has answered over another connection a moment ago. `silent`: as the field, until
        it answers. `on_silence`: called whenever that has changed. `pace`: None where nothing else needs the loop."""
        self.worker = worker
        self.watched = False
        """It is pinged without open requests, too."""
        self.silent = silent
        """It was asked and has not answered: no request should choose it."""
        self.used_at = clock.now()
        """When a request or a question was last sent to it, on `clock`, or the last request ended."""
        self._identified = trusted
        """Its incarnation is at this address."""
        self._news = asyncio.Event()
        """Set when the identified engine says something, or the connection ends."""
        self.received_at = float("-inf")
        """When the engine last sent anything, on `clock`."""
        self._clock = clock
        self._proof_s = max(PROOF_S, (timing.unanswered_pings + 1) * timing.ping_interval_s)
        self._proven_until = clock.now() + self._proof_s if trusted else float("-inf")
        self._on_silence = on_silence
        self._timing = timing
        self._pace = pace or ReadingPace()
        self._on_dead = on_dead
        self._listeners: dict[str, Listener] = {}
        self._unanswered = 0
        self._delivered = 0
        """Outputs since the last pause for others."""
        self._pouring: list[Pouring] = []
        """They keep tokens of the messages that are being read."""
        self._closed = False
        self._asking = 0
        """Requests that wait for a proof."""
        self._channel: AsyncDealerChannel[EngineReply, EngineRequest] = AsyncDealerChannel(
            context, worker.request_endpoint, inbound=EngineReply, outbound=EngineRequest
        )
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._watch_socket()),
            asyncio.create_task(self._ping()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @property
    def idle(self) -> bool:
        return not self._listeners

    @property
    def asked(self) -> bool:
        """Whether a request waits for its answer (`prove`)."""
        return self._asking > 0

    def submit(self, request: GenerateRequest, listener: Listener) -> bool:
        """Send a request and listen for its outputs. False when the engine takes no more messages or is dead."""
        if self._closed:
            return False
        self._note_use()
        self._listeners[request.rid] = listener
        if self._channel.send(request):
            return True
        self._listeners.pop(request.rid)
        return False

    def forget(self, rid: str, *, abort: bool) -> None:
        """Remove the listener of `rid`; `abort` also stops it in the engine. Does nothing after its end."""
        self._listeners.pop(rid, None)
        self.used_at = self._clock.now()
        if abort and not self._closed:
            self._channel.send(AbortRequest(rid=rid))

    def close_session(self, message: CloseSession) -> None:
        """Send the command to the engine. If it gets lost, the session expires after its time to live."""
        if not self._closed:
            self._channel.send(message)

    @property
    def answered(self) -> bool:
        """Whether the engine has ever sent anything here."""
        return self.received_at > float("-inf")

    @property
    def proven(self) -> bool:
        """The incarnation has answered a ping, and has not been found silent or dead since."""
        return not self._closed and self.proven_before and not self.silent

    @property
    def proven_before(self) -> bool:
        """Whether the incarnation has answered before this connection ended."""
        return self._identified

    @property
    def received_lately(self) -> bool:
        """Whether a message of the incarnation still proves that it is there."""
        return self._clock.now() < self._proven_until

    def proven_now(self) -> bool:
        """Whether nothing has to be asked before a request is sent. It counts as used then."""
        if not (self.proven and self.received_lately):
            return False
        self.used_at = self._clock.now()
        return True

    async def prove(self, *, within_s: float) -> bool:
        """Whether the incarnation answers within this time, or has lately."""
        if self.proven_now():
            return True
        if self._closed:
            return False
        opening = not self._identified and self._unanswered == 0
        self._note_use()
        self._news.clear()
        if not opening:  # else it was asked when the connection was opened
            self.greet()
        self._asking += 1
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            # This event loop may have been blocked in the meantime.
            if not self._closed:
                self._receive_rest()
            if not self.received_lately:
                self._set_silent(True)
        finally:
            self._asking -= 1
        return self.proven

    def greet(self) -> None:
        """Make the engine say something."""
        self._channel.send(Ping(nonce=0))

    def close(self) -> None:
        """Close the socket without notifying listeners. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._news.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._channel.close()

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """A connection that lacks one of its tasks would leave all its requests without an answer."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("connection to a worker failed", exc_info=error, extra={"fields": {"task": task.get_name()}})
            self._die(FAILED)

    async def _read(self) -> None:
        now = asyncio.get_running_loop().time
        try:
            while not self._closed:
                crowded, began = self._pace.is_crowded, now()
                all_read = self._receive_waiting(MAX_TOGETHER if crowded else MAX_DELIVERED)
                if crowded and self._delivered:
                    await self._pace.rest(now() - began)
                elif all_read:
                    await self._channel.readable()
                else:
                    await asyncio.sleep(0)
        except WireError as error:
            self._die_of(error)

    def _receive_waiting(self, most: int = MAX_DELIVERED) -> bool:
        """Receive what has come, until there were `most` outputs. False: not all of it; others must have their turn, or
        the connection is closed."""
        self._delivered = 0
        try:
            for number, reply in enumerate(self._channel.waiting(), 1):
                self._on_reply(reply)
                if self._closed or self._delivered >= most or number >= MAX_PER_RECEIVE:
                    return False
        finally:
            self._pour()
        return True

    def _pour(self) -> None:
        pouring, self._pouring = self._pouring, []
        for each in pouring:
            each.pour(self.received_at)

    def _on_reply(self, reply: EngineReply) -> None:
        self._unanswered = 0
        self.received_at = self._clock.now()
        if self._identified:
            self._note_proof()
        match reply:
            case OutputBatch():
                self._deliver(reply)
            case Taken():
                self._note_taken(reply.rid)
            case Pong():
                self._note_pong(reply)

    def _deliver(self, batch: OutputBatch) -> None:
        self._delivered += len(batch.outputs)
        for output in batch.outputs:
            listener = self._listeners.get(output.rid)
            if listener is None:
                continue
            try:
                keeps = listener.on_output(output)
                if keeps is not None:
                    self._pouring.append(keeps)
            except Exception:
                # One request has failed; the outputs of others are in the same batch.
                logger.exception("output could not be passed on", extra={"fields": {"rid": output.rid}})
                self.forget(output.rid, abort=True)
                listener.on_lost()

    def _note_pong(self, pong: Pong) -> None:
        if pong.incarnation == self.worker.incarnation:
            self._identified = True
            self._note_proof()
        else:
            self._die(f"{pong.incarnation} answers at its address")

    def _note_taken(self, rid: str) -> None:
        listener = self._listeners.get(rid)
        if listener is not None:
            listener.on_taken()

    def _note_proof(self) -> None:
        self._proven_until = self.received_at + self._proof_s
        self._set_silent(False)
        self._news.set()

    def _note_use(self) -> None:
        if not self._is_pinged:
            self._unanswered = 0
        self.used_at = self._clock.now()

    @property
    def _is_pinged(self) -> bool:
        return self.watched or not self.idle or self._clock.now() - self.used_at < PROOF_S

    def _set_silent(self, silent: bool) -> None:
        if silent != self.silent:
            self.silent = silent
            if self._on_silence is not None and not self._closed:
                self._on_silence(self)

    async def _watch_socket(self) -> None:
        await self._channel.disconnected()
        # Tokens that came before the end are not made a second time elsewhere.
        self._receive_rest()
        self._die(LOST)

    def _receive_rest(self) -> None:
        """All that has come."""
        try:
            while not self._receive_waiting():
                if self._closed:
                    return
        except WireError as error:
            self._die_of(error)

    async def _ping(self) -> None:
        for nonce in itertools.count():
            await asyncio.sleep(self._timing.ping_interval_s)
            if not self._is_pinged:
                continue
            if not self._identified:
                self._set_silent(True)
            if self._unanswered >= self._timing.unanswered_pings:
                # The reader may rest (`reading_pace`), or have been kept from its turn.
                self._receive_rest()
            if self._unanswered >= self._timing.unanswered_pings:
                self._die("no answer to pings")
                return
            self._unanswered += 1
            self._channel.send(Ping(nonce=nonce))

    def _die_of(self, error: WireError) -> None:
        logger.warning("engine sent an unreadable message", extra={"fields": {"error": str(error)}})
        self._die(UNREADABLE)

    def _die(self, reason: str) -> None:
        if self._closed:
            return
        self.close()
        # None waits for nothing, whatever fails here.
        with ExitStack() as lost:
            for listener in reversed(self._listeners.values()):
                lost.callback(listener.on_lost)
            self._on_dead(self, reason)
            self._listeners = {}
