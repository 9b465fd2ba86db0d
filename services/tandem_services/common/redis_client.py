"""A Redis client with one shared connection, a deadline per command and a circuit breaker.

    closed ──3 failures in a row──▶ open ──0.5 s──▶ half-open ──one command──▶ closed, or open again

Redis contains only hints [redis-is-optional], so the client neither retries nor waits: a command is answered within its
deadline or fails with `RedisUnavailableError`, and the caller continues without it. All failures count the same:
refused, hung, LOADING, READONLY, OOM, NOPERM, or bytes that are no Redis protocol. Functions that fail because
their slot is being moved leave the breaker closed.

Its one connection is a `redis_line.RedisLine`, which follows a cluster's redirections.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar, cast
from urllib.parse import unquote, urlunsplit

import msgspec
from redis.asyncio import Redis
from redis.exceptions import (
    RedisError,
    ResponseError,
    TryAgainError,
)

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.base.errors import ConfigError
from tandem_services.common.private_folder import write_private
from tandem_services.common.redis_line import RedisLine
from tandem_services.common.redis_places import Places, places_of
from tandem_services.common.redis_url import RedisUrl, mask_password, split_url

logger = logging.getLogger(__name__)

ROUTING_TIMEOUT_S = 0.02
"""The most that any request waits for Redis [redis-bounded-wait]."""

BACKGROUND_TIMEOUT_S = 1.0
"""For heartbeats and index updates, which no request waits for."""

WARN_EVERY_S = 60.0
"""A broken Redis costs one log line a minute [redis-is-optional]."""

Argument: TypeAlias = str | bytes | int | float
Reply: TypeAlias = bytes | int | Sequence["Reply"] | None


class RedisUnavailableError(Exception):
    """Redis gave no usable answer in time. The message never contains a password."""


class FunctionMissingError(RedisUnavailableError):
    """Redis answers, but the function library is not loaded."""


class UnreadableReplyError(RedisUnavailableError):
    """Redis has executed the command, but its reply is not of the shape that this release expects."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(kw_only=True, slots=True)
class CircuitBreaker:
    """Stops sending commands to a server that does not answer, and probes it with one command at a time."""

    clock: Clock = field(default_factory=MonotonicClock)
    failures_to_open: int = 3
    open_s: float = 0.5
    state: BreakerState = BreakerState.CLOSED
    _failures: int = 0
    _retry_at: float = 0.0

    @property
    def would_admit(self) -> bool:
        return self.state is BreakerState.CLOSED or self.clock.now() >= self._retry_at

    def admit(self) -> bool:
        """Whether the next command may be sent. In the open state one command per `open_s` may."""
        if not self.would_admit:
            return False
        if self.state is not BreakerState.CLOSED:
            # The trial may be cancelled and never report back; the next one is due after `open_s` anyway.
            self.state = BreakerState.HALF_OPEN
            self._retry_at = self.clock.now() + self.open_s
        return True

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= self.failures_to_open:
            self.state = BreakerState.OPEN
            self._retry_at = self.clock.now() + self.open_s


@dataclass(kw_only=True, slots=True)
class RarelyLogged:
    """Lets one message through per `every_s`, with the number of suppressed ones."""

    clock: Clock
    every_s: float = WARN_EVERY_S
    _next_at: float = float("-inf")
    _held_back: int = 0

    def warning(self, message: str) -> None:
        if self.clock.now() < self._next_at:
            self._held_back += 1
            return
        logger.warning("%s (%d similar since the last line)", message, self._held_back)
        self._next_at = self.clock.now() + self.every_s
        self._held_back = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisAddress:
    """Where Redis is. `repr` and `str` never show the password."""

    url: str = field(repr=False)
    """See `redis_url`."""
    password_file: Path | None = None
    """Takes the place of a password in the URL."""

    def __post_init__(self) -> None:
        files = RedisUrl.parse(self.url).files
        for name, path in files.items():
            if not path.is_file():
                raise ConfigError(f"--redis-url {self}: {name} {path}: no such file")
        if self.password_file is not None and not self.password_file.is_file():
            raise ConfigError(f"--redis-password-file {self.password_file}: no such file")

    def __str__(self) -> str:
        return mask_password(self.url)

    def with_password_in(self, path: Path) -> "RedisAddress":
        """The same place with the password of the URL, if it has one, in `path`, for the owner's eyes only."""
        authority, parts = split_url(self.url)
        if self.password_file is not None or not authority.password:
            return self
        write_private(path, unquote(authority.password))
        user = f"{authority.username}@" if authority.username else ""
        place = user + authority.hosts
        return RedisAddress(url=urlunsplit(parts._replace(netloc=place)), password_file=path)

    def places(self) -> Places:
        """Where a client's connections lead. None is open yet."""
        return places_of(RedisUrl.parse(self.url), self.password_file)


class RedisClient:
    """Sends commands, each with one deadline. Raises `RedisUnavailableError`, never a redis-py error."""

    def __init__(self, address: RedisAddress, *, timeout_s: float, breaker: CircuitBreaker | None = None) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.breaker = breaker or CircuitBreaker()
        self.failures = 0
        """Commands without a usable answer since start, those that the breaker refused not counted."""
        self._line = RedisLine(address.places())
        self._readers = cast("Mapping[str, Callable[[Reply], Reply]]", Redis(protocol=2).response_callbacks)
        """redis-py's, of commands whose replies mean more than their bytes."""
        self._log = RarelyLogged(clock=self.breaker.clock)
        self._unreadable: dict[str, RarelyLogged] = {}

    @property
    def available(self) -> bool:
        """False while the breaker would refuse a command."""
        return self.breaker.would_admit

    async def command(self, *args: Argument) -> Reply:
        """Send one command. Raises `RedisUnavailableError`, or `FunctionMissingError` for an unknown FCALL."""
        if not self.breaker.admit():
            raise RedisUnavailableError(f"Redis at {self.address} did not answer lately")
        try:
            reply = await self._send(*args, within_s=self.timeout_s)
        except ResponseError as error:
            if "Function not found" in str(error):
                # The server answers: after an outage the command that loads the functions must be admitted.
                self.breaker.succeeded()
                raise FunctionMissingError(str(error)) from error
            failed = self._failed(error, args)
            if isinstance(error, TryAgainError) or "access a non local key" in str(error):
                # Answers in time: while a slot is moved, functions fail and commands with one key do not.
                self.breaker.succeeded()
            raise failed from error
        # ValueError and the like: redis-py's parser on bytes that are no Redis protocol [redis-is-optional].
        except (RedisError, OSError, ValueError, IndexError, TypeError) as error:
            raise self._failed(error, args) from error
        self.breaker.succeeded()
        return reply

    async def require(self, *, wait_s: float) -> None:
        """Return once Redis answers a PING; raise `RedisUnavailableError` naming the fix after `wait_s`."""
        deadline = self.breaker.clock.now() + wait_s
        waiting = False
        while True:
            try:
                await self._send("PING", within_s=max(self.timeout_s, BACKGROUND_TIMEOUT_S))
                self.breaker.succeeded()
                return
            except (RedisError, OSError, ValueError, IndexError, TypeError) as error:
                if self.breaker.clock.now() >= deadline:
                    raise RedisUnavailableError(
                        f"cannot use Redis at {self.address}: {_reason(error)}. "
                        "Start it, or correct --redis-url (TANDEM_REDIS_URL)"
                    ) from error
                if not waiting:
                    logger.warning("waiting for Redis at %s: %s", self.address, _reason(error))
                waiting = True
            await asyncio.sleep(0.2)

    def unreadable(self, what: str, reason: object) -> UnreadableReplyError:
        """Redis has sent an invalid reply: an error to raise, which is logged once a minute.

        `what`: the function that answered, or what was requested; one of a few.
        """
        text = " ".join(str(reason).split())[:200]
        message = f"Redis at {self.address}: {what} cannot be read: {text}"
        self._unreadable.setdefault(what, RarelyLogged(clock=self.breaker.clock)).warning(message)
        return UnreadableReplyError(message)

    async def close(self) -> None:
        await self._line.close()

    async def _send(self, *args: Argument, within_s: float) -> Reply:
        try:
            reply: Reply = await self._line.command(*args, within_s=within_s)
        except RuntimeError as error:
            # uvloop's word for a connection that was reset a moment ago.
            raise ConnectionResetError(str(error)) from error
        read = self._readers.get(str(args[0]))
        return reply if read is None else read(reply)

    def _failed(self, error: Exception, asked: Sequence[Argument]) -> RedisUnavailableError:
        self.failures += 1
        self.breaker.failed()
        what = " ".join(map(str, asked[:2]))[:100]  # the command, and its key or function
        message = f"Redis at {self.address}: {what}: {_reason(error)}"
        self._log.warning(message)
        return RedisUnavailableError(message)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = " ".join(str(error).split()).rstrip(".")[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


T = TypeVar("T")


def decoded(reply: Reply, decode: Callable[[bytes], T]) -> T:
    """The content of a reply. Raises `ValueError` for one that is no bytes, or that `decode`, of msgspec, rejects."""
    if not isinstance(reply, bytes):
        raise ValueError(f"it is {type(reply).__name__} instead of bytes")
    try:
        return decode(reply)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
