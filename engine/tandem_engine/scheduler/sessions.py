"""Conversations that the engine keeps: a turn brings only what is new.

Life of a session
    1. begun      a request names it with turn 0 and brings the whole prompt
    2. busy       its turn is computed like any request. Nobody else may continue it meanwhile
    3. kept       the turn ended: prompt and output are remembered, their whole pages pinned in the prefix cache
    4. continued  the next turn's tokens are appended to what is remembered, and 2 begins again
    5. forgotten  closed, not used for `session_ttl`, or the one used longest ago when there are too many

A turn that is aborted or fails leaves the session as it was before. Pins are a favour to the next turn: all
sessions together pin no more than `max_pages`, and when requests need the pages the session used longest ago
loses its pin first. What is not pinned any more is recomputed, with the same output.

Sessions belong to a cache salt, as cached prefixes do: one tenant cannot continue another's.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tandem_engine.clock import Clock
from tandem_engine.config import SchedulerConfig
from tandem_engine.errors import InvalidRequestError
from tandem_engine.memory.kv_memory import KvMemory, Pin
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.scheduler.request import Request


class SessionKey(NamedTuple):
    salt: str
    id: str


@dataclass(kw_only=True, slots=True)
class Session:
    """One conversation."""

    token_ids: tuple[int, ...] = ()
    """Prompt and output of all turns."""
    turns: int = 0
    """Turns that have ended."""
    busy: Request | None = None
    pin: Pin | None = None
    used_at: float = 0.0
    """Monotonic time."""


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
        """`message` with all tokens of its conversation. Changes nothing here.

        Raises:
            InvalidRequestError: the session cannot be named so, is not kept here, is busy, or has another number
                of turns.
        """
        if message.session is None:
            return message
        message.session.check()
        if message.handoff is not None:
            raise InvalidRequestError("a session is continued where it is kept, without a handoff", param="session")
        session = self._sessions.get(_key(message))
        if session is not None and session.busy is not None:
            raise InvalidRequestError(f"session {message.session.id!r} is computing another turn", param="session")
        if message.session.turn == 0:
            return message
        if session is None or not session.turns:
            raise InvalidRequestError(
                f"session {message.session.id!r} is not kept here: it was never begun, was closed, or expired; "
                "send the whole conversation with turn 0",
                param="session",
            )
        if message.session.turn != session.turns:
            raise InvalidRequestError(
                f"session {message.session.id!r} has {session.turns} turns, the request continues after "
                f"{message.session.turn}",
                param="session",
            )
        return msgspec.structs.replace(message, input_ids=(*session.token_ids, *message.input_ids))

    def begin_turn(self, message: GenerateRequest, req: Request) -> None:
        """`req`, made of `whole_turn`, computes the next turn."""
        if message.session is None:
            return
        key = _key(message)
        if message.session.turn == 0:
            self._forget(key)
            self._sessions[key] = Session()
        session = self._sessions[key]
        session.busy = req
        self._touch(key, session)
        while len(self._sessions) > self.config.max_sessions:
            self._forget(next(iter(self._sessions)))

    def end_turn(self, req: Request, finish: Finish) -> None:
        """`req` ended and its KV is in the cache: keep the session, or what it was before if this went wrong."""
        if req.session is None:
            return
        key = SessionKey(req.cache_salt, req.session)
        session = self._sessions.get(key)
        if session is None or session.busy is not req:
            return
        session.busy = None
        if finish.reason in {FinishReason.ABORT, FinishReason.ERROR}:
            if not session.turns:
                self._forget(key)
            return
        session.token_ids = (*req.origin_input_ids, *req.output_ids)
        session.turns += 1
        self._touch(key, session)
        self._pin(key, session)

    def close(self, salt: str, session_id: str) -> None:
        """Forget a session. A turn that runs goes on; unknown ids are ignored."""
        self._forget(SessionKey(salt, session_id))

    def sweep(self) -> None:
        """Forget what was not used for `session_ttl`."""
        limit = self.clock.now() - self.config.session_ttl
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.used_at > limit or session.busy is not None:
                return
            self._forget(key)

    def give_way(self) -> bool:
        """Drop the pin of the session used longest ago. False when nothing is pinned."""
        pinned = next((session for session in self._sessions.values() if session.pin is not None), None)
        if pinned is None:
            return False
        self._unpin(pinned)
        return True

    def _touch(self, key: SessionKey, session: Session) -> None:
        session.used_at = self.clock.now()
        self._sessions.move_to_end(key)

    def _pin(self, key: SessionKey, session: Session) -> None:
        """Exchange the pin for one on the longer history, within the bound on all pins."""
        self._unpin(session)
        pin = self.memory.pin(session.token_ids, salt=key.salt)
        if pin.pages > self.max_pages:
            self.memory.unpin(pin)
            return
        while self.pinned_pages + pin.pages > self.max_pages:
            self.give_way()
        session.pin = pin

    def _unpin(self, session: Session) -> None:
        if session.pin is not None:
            self.memory.unpin(session.pin)
            session.pin = None

    def _forget(self, key: SessionKey) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._unpin(session)


def _key(message: GenerateRequest) -> SessionKey:
    assert message.session is not None, f"request {message.rid} has no session"
    return SessionKey(message.cache_salt, message.session.id)
