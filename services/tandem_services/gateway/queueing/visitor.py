"""One request in a gateway's queue: how it asks for workers, and who waits for the answer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem_services.gateway.queueing.fair_queue import Waiting
from tandem_services.router.choice import Choice

Ask = Callable[[], Awaitable[Choice]]
"""Asks the router, and reserves what it names. Raises `NoWorkersError`."""


class Answer(Protocol):
    """Who waits for the end of a visit. An `asyncio.Future` is one."""

    def done(self) -> bool:
        """Nobody waits any more."""

    def set_result(self, result: Choice, /) -> None:
        """Admitted; to be called once."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Refused; to be called once."""


class Verdict(Enum):
    """Why a request was not admitted."""

    NO_ROOM = "no_room"
    NO_WORKER = "no_worker"


@dataclass(kw_only=True, slots=True, eq=False)
class Visitor(Waiting):
    """One request in the queue, and who waits for its end."""

    prompt_tokens: int
    ask: Ask
    choice: Answer
    verdict: Verdict = Verdict.NO_ROOM
    """Of its last try."""
