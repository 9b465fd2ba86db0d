"""Sessions over HTTP: a request with `session_params` brings one turn and runs on the worker that keeps the others.

    1. taken   the session is looked up (`SessionManager.take`); without one only turn 0 is accepted
    2. bound   the worker of the first turn is recorded before anything is sent there. Without the record the next turn
               would start a conversation without its beginning
    3. ended   tokens and last token are recorded before the client receives the end, so that its next turn finds them
       failed  a failed first turn leaves the session opened; any other leaves it unchanged

Later turns have one attempt, because only the worker that keeps the session has its context. If that worker is lost,
the client gets a 409 with code `session_lost` and must send the whole conversation again.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem_engine.base.errors import SessionLostError
from tandem_engine.base.logs import quoted
from tandem_engine.messages.requests import MAX_SESSION_BYTES, SessionRef
from tandem_services.common.errors import ApiError, bad_request, conflict, not_found, unavailable
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.http.known_fields import Refused
from tandem_services.gateway.limits import MAX_TURN
from tandem_services.gateway.output.token_sequence import Accepted, Consume
from tandem_services.router.shared_state import SessionBinding, SessionName

logger = logging.getLogger(__name__)
PARAM = "session_params"
LOOK_UP_RETRY_S = 1.0


class SessionDirectory(Protocol):
    """Where sessions are, shared by all gateways. Methods raise `RedisUnavailableError`; see `SessionBindings`."""

    async def find(self, name: SessionName) -> SessionBinding | None: ...

    async def open(self, name: SessionName, *, ttl_s: float) -> bool: ...

    async def put(self, name: SessionName, binding: SessionBinding, *, ttl_s: float) -> None: ...

    async def update(self, name: SessionName, binding: SessionBinding, *, ttl_s: float) -> None: ...

    async def forget(self, name: SessionName) -> SessionBinding | None: ...


class SessionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's field, as far as a conversation that only grows needs it."""

    id: str
    turn: int | None = None
    """Our field: number of earlier turns. 0 starts or restarts the session; any other number must be correct."""
    rid: Refused = None
    offset: Refused = None
    replace: Refused = None
    drop_previous_output: Refused = None


@dataclass(kw_only=True, slots=True)
class SessionTurn:
    """One request of a session."""

    name: SessionName
    number: int | None
    """As the client counts; None when it does not."""
    found: SessionBinding
    """Before this turn."""
    directory: SessionDirectory
    ttl_s: float
    turn_s: float
    """Longest that a turn may take: while it runs its session is not forgotten."""
    worker: str | None = None
    """The incarnation it was sent to."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of log records about its request."""
    keeps_output: bool = True
    """False: it adds its prompt to the conversation, and no output."""

    @property
    def begins(self) -> bool:
        return self.number == 0 or self.found.incarnation is None

    @property
    def keeper(self) -> str | None:
        """The incarnation it must go to; None for a first turn."""
        return None if self.begins else self.found.incarnation

    @property
    def history(self) -> int:
        """Tokens before this turn."""
        return 0 if self.begins else self.found.tokens

    @property
    def last_token(self) -> int | None:
        """The token before this turn, as far as it is known."""
        return None if self.begins else self.found.last_token

    @property
    def ref(self) -> SessionRef:
        """The session fields for the worker."""
        return SessionRef(id=self.name.id, turn=0 if self.begins else self.number, keeps_output=self.keeps_output)

    async def bind(self, incarnation: str, *, about: Mapping[str, Any]) -> None:
        """The turn is about to go to this worker. `about`: fields of log records.

        Raises `ApiError` 503 when that cannot be written down.
        """
        self.worker, self.about = incarnation, about
        binding = SessionBinding(incarnation=incarnation) if self.begins else self.found
        write = self.directory.put if self.number == 0 else self.directory.update
        try:
            await write(self.name, binding, ttl_s=self.ttl_s + self.turn_s)
        except RedisUnavailableError as error:
            raise _out_of_sight() from error

    async def end(self, *, prompt_tokens: int, output: Sequence[int]) -> None:
        """The turn is part of the session now."""
        kept = output if self.keeps_output else ()
        tokens = self.history + prompt_tokens + len(kept)
        last = kept[-1] if kept else None
        await self._update(SessionBinding(incarnation=self.worker, tokens=tokens, last_token=last))

    async def fail(self) -> None:
        """The turn added nothing. A first one may be sent again."""
        await self._update(SessionBinding() if self.begins else self.found)

    async def _update(self, binding: SessionBinding) -> None:
        try:
            await self.directory.update(self.name, binding, ttl_s=self.ttl_s)
        except RedisUnavailableError:
            # The worker has the session in any case; only the local record is late.
            logger.warning("cannot update a session's binding", extra={"fields": {**self.about, "worker": self.worker}})


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionManager:
    """Where requests get their turn, and sessions are opened and closed. One per model service."""

    directory: SessionDirectory
    ttl_s: float
    turn_s: float

    async def take(
        self, params: SessionParams | None, *, cache_salt: str, choices: int, keeps_output: bool = True
    ) -> SessionTurn | None:
        """The turn that a request is; None when it names no session.

        Raises:
            ApiError: 400 for what no session can do, 409 when it is not kept, 503 when that cannot be determined.
        """
        if params is None:
            return None
        if choices != 1:
            raise bad_request(f"{PARAM}: a session continues after one output, got {choices}: n must be 1", "n")
        if params.turn is not None and not 0 <= params.turn <= MAX_TURN:
            raise bad_request(
                f"{PARAM}.turn must be between 0 and {MAX_TURN}, got {quoted(params.turn)}", f"{PARAM}.turn"
            )
        name = session_name(params.id, cache_salt, param=f"{PARAM}.id")
        try:
            found = await self.directory.find(name)
        except RedisUnavailableError as error:
            raise _out_of_sight() from error
        if params.turn != 0 and (found is None or (params.turn and found.incarnation is None)):
            raise session_lost()
        return SessionTurn(
            name=name,
            number=params.turn,
            found=found or SessionBinding(),
            directory=self.directory,
            ttl_s=self.ttl_s,
            turn_s=self.turn_s,
            keeps_output=keeps_output,
        )

    async def open(self, name: SessionName) -> None:
        """Raises `ApiError` 409 when the id is taken, 503 when that cannot be determined."""
        try:
            if not await self.directory.open(name, ttl_s=self.ttl_s):
                raise conflict(f"session {quoted(name.id)} is open already", "session_id", reason="session_exists")
        except RedisUnavailableError as error:
            raise _out_of_sight() from error

    async def close(self, name: SessionName) -> str | None:
        """Forget it; returns the incarnation that keeps it, if one does. Raises `ApiError` 404 or 503."""
        try:
            found = await self.directory.forget(name)
        except RedisUnavailableError as error:
            raise _out_of_sight() from error
        if found is None:
            raise not_found(f"There is no session {quoted(name.id)}.", "session_id", reason="session_lost")
        return found.incarnation


async def remembered(
    run: Callable[[Consume], Awaitable[None]], consume: Consume, turn: SessionTurn, *, prompt_tokens: int
) -> None:
    """`run`, of the turn's one choice, for `consume`; how its output ends is noted before the end is passed on."""
    received: list[int] = []
    ended = False

    async def noted(accepted: Accepted) -> bool:
        nonlocal ended
        received.extend(accepted.token_ids)
        if accepted.finish is not None:
            await turn.end(prompt_tokens=prompt_tokens, output=received)
            ended = True
        return await consume(accepted)

    try:
        await run(noted)
    finally:
        if not ended and turn.worker is not None:
            await turn.fail()


def session_name(session_id: str, cache_salt: str, *, param: str) -> SessionName:
    """Raises `ApiError` 400 for an id that no session can have."""
    if not 1 <= len(session_id.encode("utf-8", "surrogatepass")) <= MAX_SESSION_BYTES:
        raise bad_request(f"{param} must have 1 to {MAX_SESSION_BYTES} bytes", param)
    return SessionName(id=session_id, cache_salt=cache_salt)


def session_lost() -> ApiError:
    """409: the conversation has to be sent again."""
    return conflict(
        "The session is not kept: it was never opened, was closed, has expired, or its worker is gone. "
        f"Send the whole conversation again with {PARAM}.turn 0.",
        f"{PARAM}.id",
        reason=SessionLostError.code,
    )


def _out_of_sight() -> ApiError:
    return unavailable("Sessions cannot be looked up now. Try again later.", retry_after=LOOK_UP_RETRY_S)
