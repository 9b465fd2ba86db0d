"""One request in the gateway's queue: how it queries the router, where its result goes, and why it was not admitted."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem_services.common.errors import ApiError, unavailable
from tandem_services.gateway.queueing.fair_queue import Waiting
from tandem_services.gateway.queueing.lanes import Lane
from tandem_services.router.decision import RouteDecision

Ask = Callable[[], Awaitable[RouteDecision]]
"""Queries the router, and reserves what it returns. Raises `NoWorkersError`."""


class Answer(Protocol):
    """Receives the result of a queued request. An `asyncio.Future` is one."""

    def done(self) -> bool:
        """No caller waits any more."""

    def set_result(self, result: RouteDecision, /) -> None:
        """Admitted; to be called once."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Refused; to be called once."""


class Verdict(Enum):
    """Why a request was not admitted."""

    NO_ROOM = "no_room"
    NO_WORKER = "no_worker"


@dataclass(kw_only=True, slots=True, eq=False)
class QueueEntry(Waiting):
    """One request in the queue, and the receiver of its result."""

    prompt_tokens: int
    ask: Ask
    decision: Answer
    lane: Lane | None = None
    """None: it passes no other."""
    verdict: Verdict = Verdict.NO_ROOM
    """Of its last try."""
    awaits_start: bool = False
    """It has waited for a worker that starts."""


def refusal(reason: str, *, no_workers: bool, wait_s: float, start_s: float) -> ApiError:
    """503, or 429 for a displaced request. `reason`: see `Observer.refused`. `wait_s`: until there may be capacity;
    `start_s`: until there may be a worker."""
    if reason == Verdict.NO_WORKER.value or no_workers:
        return unavailable("No worker can take the request now. Try again later.", retry_after=start_s)
    if reason == "pushed_out":
        return ApiError(
            429,
            "Your requests fill the queue. Try again later, or send fewer at once.",
            kind="RateLimitError",
            reason="queue_full",
            retry_after=wait_s,
        )
    return unavailable("All workers are at their limit. Try again later.", retry_after=wait_s)
