"""Conversations that the engine keeps: a turn brings only its new tokens.

    1. begun      a request names the session with turn 0 and brings the whole prompt
    2. busy       its turn is computed like any request. No other request may continue the session until it ends
    3. kept       the turn ended: prompt and output are remembered, their whole pages pinned in the prefix cache
    4. continued  the next turn's tokens are appended to those remembered, and 2 begins again
    5. forgotten  closed, not used for `session_ttl`, or the least recently used when there are too many

A turn that is aborted or fails leaves the session as it was before. All sessions together pin at most `max_pages`.
When requests need the pages, the least recently used session loses its pin first. Pages without a pin are recomputed
if needed, with the same output.

Sessions belong to a cache salt, as cached prefixes do: one tenant cannot continue another's. All turns of a session are
computed by the same adapter, or by the base model.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import InvalidRequestError, SessionError, SessionLostError
from tandem_engine.config import SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory, Pin
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest, HandoffSide, space_of
from tandem_engine.scheduler.request import Request


class SessionKey(NamedTuple):
    salt: str
    id: str


@dataclass(kw_only=True, slots=True)
class Session:
    """One conversation."""

    token_ids: tuple[int, ...] = ()
    """Prompt and output of all turns."""
    space: CacheSpace = BASE_SPACE
    """Where its prefix is cached."""
    turns: int = 0
    """Turns that have ended."""
    busy: Request | None = None
    turn: int = 0
    """Which one `busy` computes."""
    keeps_output: bool = True
    """Whether the output of `busy` becomes part of the conversation."""
    pin: Pin | None = None
    used_at: float = 0.0
    """Monotonic time."""

    @property
    def computes_turn(self) -> bool:
        """A turn that is marked for abort adds nothing any more, so the next one need not wait for its end."""
        return self.busy is not None and self.busy.to_finish is None


@dataclass(kw_only=True, slots=True)
class Sessions:
    """All sessions of one scheduler, the one used longest ago first."""

    config: SchedulerConfig
    memory: KvMemory
    clock: Clock
    max_pages: int
    """That all pins together may hold; a page shared by two sessions counts twice."""
    _sessions: OrderedDict[SessionKey, Session] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pinned_pages(self) -> int:
        """Pages that pins keep in the cache."""
        return sum(session.pin.pages for session in self._sessions.values() if session.pin is not None)

    def whole_turn(self, message: GenerateRequest) -> GenerateRequest:
        """`message` with all tokens of its conversation, wanting logprobs of none but its own. Changes nothing here.

        Raises:
            InvalidRequestError: the session cannot be named so, or comes with a handoff that does not suit it.
            SessionLostError: it is not kept here.
            SessionError: it is busy, or has another number of turns.
        """
        ref = message.session
        if ref is None:
            return message
        ref.check()
        _check_handoff(message)
        session = self._kept(_key(message))
        if session is not None and session.computes_turn:
            raise SessionError(f"session {ref.id!r} is computing another turn")
        if ref.turn == 0:
            return message
        if session is None or not session.turns:
            raise SessionLostError(
                f"session {ref.id!r} is not kept here: it was never begun, was closed, or expired; "
                "send the whole conversation as the first turn of a session"
            )
        if session.space != space_of(message):
            raise SessionError(
                f"session {ref.id!r} was begun with another adapter, or without one; begin a session for each"
            )
        if ref.turn not in (None, session.turns):
            raise SessionError(f"session {ref.id!r} has {session.turns} turns, the request continues after {ref.turn}")
        return _after(session.token_ids, message)

    def begin_turn(self, message: GenerateRequest, req: Request) -> None:
        """`req`, made of `whole_turn`, computes the next turn."""
        if message.session is None:
            return
        key = _key(message)
        if self._kept(key) is None:
            # It may have expired without having been swept yet.
            self._forget(key)
        session = self._sessions.setdefault(key, Session())
        turn = message.session.turn
        session.busy, session.turn = req, session.turns if turn is None else turn
        session.keeps_output = message.session.keeps_output
        self._touch(key, session)
        while len(self._sessions) > self.config.max_sessions:
            self._forget(next(iter(self._sessions)))

    def end_turn(self, req: Request, finish: Finish) -> None:
        """`req` ended and its KV is in the cache: keep the session, or what it was before if this went wrong."""
        if req.session is None:
            return
        key = SessionKey(req.space.salt, req.session)
        session = self._sessions.get(key)
        if session is None or session.busy is not req:
            return
        session.busy = None
        if finish.reason in {FinishReason.ABORT, FinishReason.ERROR}:
            if not session.turns:
                self._forget(key)
            return
        session.space = req.space
        session.token_ids = (*req.origin_input_ids, *(req.output_ids if session.keeps_output else ()))
        session.turns = session.turn + 1
        self._touch(key, session)
        self._pin(session)

    def give_up_turn(self, req: Request) -> None:
        """`req` is released without an end of its own: the session is what it was before."""
        self.end_turn(req, Finish(reason=FinishReason.ABORT))

    def close(self, salt: str, session_id: str) -> None:
        """Forget a session. A running turn continues; unknown ids are ignored."""
        self._forget(SessionKey(salt, session_id))

    def sweep(self) -> None:
        """Forget what was not used for `session_ttl`."""
        limit = self.clock.now() - self.config.session_ttl
        aged = takewhile(lambda entry: entry[1].used_at <= limit, self._sessions.items())
        for key in [key for key, session in aged if self._expired(session)]:
            self._forget(key)

    def unpin_idle_session(self) -> bool:
        """Drop the pin of the session used longest ago. False when nothing is pinned."""
        pinned = next((session for session in self._sessions.values() if session.pin is not None), None)
        if pinned is None:
            return False
        self._unpin(pinned)
        return True

    def _kept(self, key: SessionKey) -> Session | None:
        session = self._sessions.get(key)
        # An idle engine does not sweep.
        return None if session is None or self._expired(session) else session

    def _expired(self, session: Session) -> bool:
        return session.busy is None and session.used_at <= self.clock.now() - self.config.session_ttl

    def _touch(self, key: SessionKey, session: Session) -> None:
        session.used_at = self.clock.now()
        self._sessions.move_to_end(key)

    def _pin(self, session: Session) -> None:
        """Exchange the pin for one on the longer history, within the bound on all pins."""
        self._unpin(session)
        pin = self.memory.pin(session.token_ids, space=session.space)
        if pin.pages > self.max_pages:
            self.memory.unpin(pin)
            return
        while self.pinned_pages + pin.pages > self.max_pages:
            self.unpin_idle_session()
        session.pin = pin

    def _unpin(self, session: Session) -> None:
        if session.pin is not None:
            self.memory.unpin(session.pin)
            session.pin = None

    def _forget(self, key: SessionKey) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._unpin(session)


def _check_handoff(message: GenerateRequest) -> None:
    """The receiver of the first turn's KV keeps the session; later turns are computed there."""
    assert message.session is not None, f"request {message.rid} has no session"
    handoff = message.handoff
    if handoff is None or (handoff.side is HandoffSide.RECEIVE and message.session.turn == 0):
        return
    raise InvalidRequestError("a session is continued where it is kept, without a handoff", param="session")


def _after(history: tuple[int, ...], message: GenerateRequest) -> GenerateRequest:
    sampling = message.sampling
    if sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, logprob_start=sampling.logprob_start + len(history))
    return msgspec.structs.replace(message, input_ids=(*history, *message.input_ids), sampling=sampling)


def _key(message: GenerateRequest) -> SessionKey:
    assert message.session is not None, f"request {message.rid} has no session"
    return SessionKey(message.cache_salt, message.session.id)
