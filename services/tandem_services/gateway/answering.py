"""What endpoints that ask workers share: the life of an accepted request, from its limits to its last line in the log.

deadline ─▶ plan ─▶ tokens reserved ─▶ running ─▶ answered, refused or left
                                            └───── record: explain, metrics, one log line, whatever the end
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from tandem_engine.clock import Clock
from tandem_services.common.errors import ApiError, timed_out
from tandem_services.gateway.boundary import CLIENT_CLOSED_REQUEST, RequestIdentity, identity_of
from tandem_services.gateway.closing import Closing
from tandem_services.gateway.deadline import deadline_of
from tandem_services.gateway.disconnect import run_until_disconnect
from tandem_services.gateway.error_responses import UNEXPECTED, as_api_error
from tandem_services.gateway.explain import ChoiceRecord, RequestRecord, log_finished
from tandem_services.gateway.metrics import GatewayMetrics
from tandem_services.gateway.request_journal import RequestJournal

T = TypeVar("T")

MAX_REFUSAL_CHARACTERS = 200
"""Of a record of a refused request."""


@dataclass(kw_only=True, slots=True)
class Answering:
    """One per gateway."""

    journal: RequestJournal
    clock: Clock
    timeout_s: float
    """Longest life of a request."""
    closing: Closing = field(default_factory=Closing)
    running: int = 0
    """Requests that are being answered, those that wait for a worker among them."""

    def deadline(self, identity: RequestIdentity, timeout_s: float | None) -> float:
        """On `clock`. `timeout_s`: the longest that the client wants to wait. Raises `ApiError` 400 for no duration."""
        return deadline_of(identity, wanted_s=timeout_s, most_s=self.timeout_s)

    def remaining(self, deadline: float) -> float:
        return max(deadline - self.clock.now(), 0.0)

    async def without_workers(self, request: Request, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, which needs no worker, in time and as long as there is a client; its body was read.

        Raises `ApiError` 504 at the deadline and `ClientGoneError` when the client leaves.
        """
        deadline = self.deadline(identity_of(request.scope), None)

        async def limited() -> T:
            async with self.bounded(deadline):
                return await work()

        return await run_until_disconnect(limited(), request.receive)

    @asynccontextmanager
    async def bounded(self, deadline: float) -> AsyncIterator[None]:
        """Raises `ApiError` in the block: 504 at the deadline, 503 when the gateway ends what still runs."""
        with self.closing.running():
            async with time_limit(self.remaining(deadline)):
                yield

    @asynccontextmanager
    async def accepted(
        self, record: RequestRecord, identity: RequestIdentity, metrics: GatewayMetrics, *, tokens: int
    ) -> AsyncIterator[None]:
        """The block answers the request, which is accounted for however the block ends.

        `metrics` are those of the model; `tokens` are those that it is expected to use. A block that has written an
        error into its stream has noted it in `record`. Raises `ApiError` 429 beyond the tenant's limits, before the
        block.
        """
        caller = identity.caller
        await caller.reserve(tokens, choices=len(record.choices))
        self.journal.open(record)
        metrics.running.inc()
        self.running += 1
        try:
            yield
            record.status = 200 if record.error is None else record.status
        except asyncio.CancelledError:
            record.status = CLIENT_CLOSED_REQUEST
            raise
        except Exception as error:
            refusal = as_api_error(error) or UNEXPECTED
            record.status, record.error = refusal.status, str(refusal)
            raise
        finally:
            metrics.running.dec()
            self.running -= 1
            caller.used(record.used_tokens)
            record.e2e_s = self.clock.now() - identity.arrived
            metrics.finished(record)
            identity.trace.finished(record)
            log_finished(record)
            self.journal.close(record)

    def refused(self, identity: RequestIdentity, endpoint: str, status: int, error: ApiError | None) -> None:
        """Keep a record of a request that was answered with an error, if it was not accepted.

        It has the error's kind and field, and none of its words: these may quote the body.
        """
        record = new_record(identity, endpoint=endpoint, requested_model="", prompt_tokens=0, choices=0)
        record.status, record.e2e_s = status, self.clock.now() - identity.arrived
        if error is not None:
            parts = filter(None, (error.kind, error.reason, error.param))
            record.error = ": ".join(parts)[:MAX_REFUSAL_CHARACTERS]
        self.journal.refuse(record)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raises `ApiError` 504 in the caller when the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise timed_out("The request did not finish before its deadline.") from error


def new_record(
    identity: RequestIdentity,
    *,
    endpoint: str,
    requested_model: str,
    prompt_tokens: int,
    choices: int,
    n: int = 1,
    stream: bool = False,
) -> RequestRecord:
    """Of a request that has just been planned; `choices` of all its prompts, `n` of each."""
    return RequestRecord(
        request_id=identity.request_id,
        client_request_id=identity.client_request_id,
        trace_id=identity.trace.trace_id,
        tenant=identity.caller.tenant.name,
        endpoint=endpoint,
        model=identity.model,
        requested_model=requested_model,
        stream=stream,
        prompt_tokens=prompt_tokens,
        n=n,
        created=int(time.time()),
        choices=[ChoiceRecord(index=index) for index in range(choices)],
    )
