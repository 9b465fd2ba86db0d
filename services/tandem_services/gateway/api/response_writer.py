"""Runs one generation request from its body to the response, and records the result.

    body ─▶ deadline ─▶ plan ─▶ tokens reserved ─▶ running ─▶ pieces ─▶ JSON document or events
                                                      └─▶ record: explain, metrics, one log line, however it ends

    Answering            life of an accepted request, shared by all endpoints that use workers
    GenerationEndpoint   the endpoint of one API: plans requests and runs them
    Answer               writes one response

Nothing is written before the first piece exists, so an error before it has an HTTP status of its own. A later error
is an event, which ends the stream.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import about_request
from tandem_engine.messages.requests import AdapterRef
from tandem_services.common.errors import ApiError
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.interface import (
    AnswerFormat,
    ReadModel,
    WholeChoice,
    make_usage,
    share_prompt_logprobs,
)
from tandem_services.gateway.api.openai_schemas import Usage
from tandem_services.gateway.dispatch.choice_run import AcceptedRequest
from tandem_services.gateway.dispatch.generation import Generator
from tandem_services.gateway.dispatch.plan import GenerationPlan
from tandem_services.gateway.http.body import body_of, decode_body
from tandem_services.gateway.http.errors import UNEXPECTED, as_api_error
from tandem_services.gateway.http.interruption import AtOnce, Client, Closing, Limit, client_of
from tandem_services.gateway.http.middleware import (
    CLIENT_CLOSED_REQUEST,
    RequestIdentity,
    deadline_of,
    identify_request,
    identity_of,
)
from tandem_services.gateway.http.sse import EventStream, TextEvents, encode_json, send_json
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.models.service import ModelService
from tandem_services.gateway.models.tokenizer_threads import TokenizerThreads
from tandem_services.gateway.objectives import Objectives, SloFields, objectives_of
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestJournal, RequestRecord, log_finished
from tandem_services.gateway.observe.predictions import header_of
from tandem_services.gateway.output.choice_text import ChoicePiece

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
        """On `clock`. `timeout_s`: the longest wait that the client accepts. Raises `ApiError` 400 for no duration."""
        return deadline_of(identity, wanted_s=timeout_s, most_s=self.timeout_s)

    def remaining(self, deadline: float) -> float:
        return max(deadline - self.clock.now(), 0.0)

    async def without_workers(self, request: Request, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, which needs no worker, in time and as long as there is a client; its body was read.

        Raises `ApiError` 504 at the deadline and `ClientGoneError` when the client leaves.
        """
        limit = self.limit(self.deadline(identity_of(request.scope), None))
        try:
            with client_of(request.scope), limit:
                return await work()
        finally:
            limit.stop()

    def limit(self, deadline: float) -> Limit:
        """Raises `ApiError` in its blocks: 504 at the deadline, 503 when the gateway ends what still runs."""
        return Limit(self.closing, self.remaining(deadline))

    async def accepted(
        self,
        record: RequestRecord,
        identity: RequestIdentity,
        served: ModelService,
        answering: Callable[[], Awaitable[None]],
        *,
        tokens: int,
    ) -> None:
        """`answering` answers the request, which is accounted for however that ends.

        `served` answers it; `tokens` are those that it is expected to use. Where an error was written into the stream,
        `record` has it. Raises `ApiError` 429 beyond the tenant's limits, before anything is answered.
        """
        caller = identity.caller
        await caller.reserve(tokens, choices=len(record.choices))
        self.journal.open(record)
        served.metrics.running.value += 1
        self.running += 1
        try:
            await answering()
            record.status = 200 if record.error is None else record.status
        except asyncio.CancelledError:
            record.status = CLIENT_CLOSED_REQUEST
            raise
        except Exception as error:
            refusal = as_api_error(error) or UNEXPECTED
            record.status, record.error = refusal.status, str(refusal)
            raise
        finally:
            served.metrics.running.value -= 1
            self.running -= 1
            caller.used(record.used_tokens)
            record.e2e_s = self.clock.now() - identity.arrived
            served.metrics.finished(record)
            served.predictions.finished(record)
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


def new_record(
    identity: RequestIdentity,
    *,
    endpoint: str,
    requested_model: str,
    prompt_tokens: int,
    choices: int,
    n: int = 1,
    stream: bool = False,
    adapter: AdapterRef | None = None,
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
        adapter=None if adapter is None else adapter.digest.hex(),
        stream=stream,
        prompt_tokens=prompt_tokens,
        n=n,
        created=int(time.time()),
        choices=[ChoiceRecord(index=index) for index in range(choices)],
    )


def keep_best(choices: Sequence[WholeChoice], *, generated: int, kept: int) -> list[WholeChoice]:
    """Of every `generated` choices in a row, those of one prompt, the `kept` best, best first and renumbered."""
    if generated == kept:
        return list(choices)
    best: list[WholeChoice] = []
    for first in range(0, len(choices), generated):
        ranked = sorted(choices[first : first + generated], key=_mean_logprob, reverse=True)
        best += ranked[:kept]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


def _mean_logprob(choice: WholeChoice) -> float:
    scores = [token.logprob.logprob for token in choice.scored]
    return sum(scores) / len(scores) if scores else float("-inf")


logger = logging.getLogger(__name__)


class ModelRequest(Protocol):
    """A decoded body with the requested model and the deadline."""

    model: str | None
    """None for the one model there is; the endpoint then fills in its name."""

    @property
    def request_id(self) -> str | None:
        """What the client calls the request."""
        ...

    @property
    def rid(self) -> str | None:
        """The same under SGLang's name."""
        ...

    @property
    def timeout(self) -> float | None:
        """The longest wait in seconds that the client accepts."""
        ...

    @property
    def slo(self) -> SloFields | None:
        """Its latency objectives."""
        ...


R = TypeVar("R", bound=ModelRequest)


class Planner(Protocol[R]):
    """One endpoint's requests and answers. The same for every model."""

    endpoint: str

    def decode(self, body: bytes) -> R:
        """Raises `ApiError` 400 naming the field at fault."""
        ...

    async def plan(self, request: R, served: ReadModel, caller: Caller) -> GenerationPlan:
        """For `served`, which `request` names. Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        ...

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat: ...


class GenerationEndpoint(Generic[R]):
    """ASGI application of one generation route."""

    def __init__(self, planner: Planner[R], models: ModelCatalog, answering: Answering) -> None:
        self._planner = planner
        self._models = models
        self._shared = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(scope, receive)
        with client_of(scope) as client:
            request = await decode_body(self._planner.decode, body)
            del body  # a request may run for minutes
            await self._serve(request, scope, client, send)

    async def _serve(self, request: R, scope: Scope, client: Client, send: Send) -> None:
        identify_request(scope, request.request_id or request.rid)
        named = self._models.of_request(scope, request.model)
        served = named.service
        request.model = request.model or served.model.name
        identity = identity_of(scope)
        caller = identity.caller
        deadline = self._shared.deadline(identity, request.timeout)
        objectives = objectives_of(scope["headers"], request.slo, served.objectives)
        limit = self._shared.limit(deadline)
        try:
            with limit:
                plan = (await self._planner.plan(request, served, caller)).owned_by(caller)
                identity.body.release()
                plan = plan.computed_by(await named.resolved(caller.tenant))
            await self._answer(plan, served, identity, objectives, limit, deadline, client, send)
        finally:
            limit.stop()

    async def _answer(
        self,
        plan: GenerationPlan,
        served: ModelService,
        identity: RequestIdentity,
        objectives: Objectives,
        limit: Limit,
        deadline: float,
        client: Client,
        send: Send,
    ) -> None:
        record = new_record(
            identity,
            endpoint=self._planner.endpoint,
            requested_model=plan.model,
            prompt_tokens=plan.prompt_tokens,
            choices=len(plan.choices),
            n=plan.n,
            stream=plan.stream,
            adapter=plan.adapter,
        )
        record.objectives = objectives or None
        request = AcceptedRequest(
            plan=plan,
            record=record,
            arrived=identity.arrived,
            deadline=deadline,
            caller=identity.caller,
            ticket=identity.ticket,
            trace=identity.trace,
        )

        def answer() -> Awaitable[None]:
            answer_format = self._planner.format(plan, served, identity.request_id, record.created)
            threads, at_once = served.prompts.threads, identity.answer_at_once
            written = Answer(request, answer_format, served.generator, limit, client, send, at_once, threads)
            return written.stream() if plan.stream else written.whole()

        tokens = 0 if identity.caller.limits is None else plan.expected_tokens
        await self._shared.accepted(record, identity, served, answer, tokens=tokens)


@dataclass(slots=True)
class _DirectWriter:
    """Writes events of a single choice. A comment may have begun the stream before them. Implements `PieceWriter`."""

    events: EventStream
    encode: Callable[[ChoicePiece], bytes]
    text_events: TextEvents | None
    """Of all pieces between the first and the last; None where these are more than text."""

    @property
    def is_ready(self) -> Callable[[], bool]:
        return self.events.is_ready

    def write(self, piece: ChoicePiece) -> None:
        self.events.write_now(self.encode(piece))

    def plain(self, choice: int) -> Callable[[str], None] | None:
        return None if self.text_events is None else _TextWriter(self.events, *self.text_events.around(choice)).write


@dataclass(frozen=True, slots=True)
class _TextWriter:
    """Writes texts of one choice, each as an event."""

    events: EventStream
    before: bytes
    after: bytes

    def write(self, text: str) -> None:
        self.events.write_now(self.before + encode_json(text) + self.after)


class Answer:
    """One answer being written."""

    def __init__(
        self,
        request: AcceptedRequest[GenerationPlan],
        answer_format: AnswerFormat,
        generator: Generator,
        limit: Limit,
        client: Client,
        send: Send,
        at_once: AtOnce,
        threads: TokenizerThreads,
    ) -> None:
        self._request = request
        self._plan = request.plan
        self._record = request.record
        self._format = answer_format
        self._generator = generator
        self._limit = limit
        self._client = client
        self._send = send
        self._at_once = at_once
        self._threads = threads
        self._opened: set[int] = set()
        """Choices whose first events are out."""

    async def whole(self) -> None:
        """Gather everything, then answer once."""
        choices = [WholeChoice(index=c.index, texts=[c.echo or ""]) for c in self._plan.choices]

        async def add(pieces: Sequence[ChoicePiece]) -> None:
            for piece in pieces:
                choices[piece.index].add(piece)

        with self._limit:
            await self._generator.run(self._request, add)
            share_prompt_logprobs(choices, self._plan.n)
            best = keep_best(choices, generated=self._plan.n, kept=self._plan.kept)
            body = await self._written(best, partial(self._format.whole, best, self._usage()))
        await send_json(self._send, 200, body, header_of(self._record), at_once=self._at_once)

    async def stream(self) -> None:
        """Answer while it is generated. Raises only before the first event."""
        headers = partial(header_of, self._record)
        async with EventStream(self._send, self._client.body, headers) as events:
            try:
                with self._limit:
                    last = await self._write_events(events)
                await events.finish(last + self._format.closing(self._usage()))
            except Exception as error:  # the status is out: the client learns in the stream
                if not events.started or events.ended:
                    raise
                await self._write_failure(events, error)

    async def _write_events(self, events: EventStream) -> bytes:
        """Returns those with which the last choice ends: they leave with the end of the stream."""
        text_events = None if self._plan.continuous_usage else self._format.text_events
        writer = _DirectWriter(events, self._piece_events, text_events)
        unfinished, last = len(self._plan.choices), b""

        async def write(batch: Sequence[ChoicePiece]) -> None:
            nonlocal unfinished, last
            written = await self._written(batch, partial(self._batch_events, batch))
            unfinished -= sum(piece.finish is not None for piece in batch)
            if unfinished:
                await events.write(written)
            else:
                last += written

        try:
            await self._generator.run(self._request, write, writer)
        except BaseException:
            # The choice has ended all the same.
            await events.write(last)
            raise
        return last

    async def _written(self, parts: Sequence[WholeChoice] | Sequence[ChoicePiece], write: Callable[[], bytes]) -> bytes:
        """Texts of all tokens of a prompt, and of what else they could have been, are not for the event loop."""
        entries = sum(len(part.prompt_logprobs) for part in parts if part.prompt_logprobs is not None)
        if not entries:
            return write()
        return await self._threads.run(write, characters=entries, refusable=False)

    def _batch_events(self, batch: Sequence[ChoicePiece]) -> bytes:
        return b"".join([self._piece_events(piece) for piece in batch])

    def _piece_events(self, piece: ChoicePiece) -> bytes:
        usage = self._usage() if self._plan.continuous_usage else None
        if piece.index in self._opened:
            return self._format.chunk(piece, usage)
        self._opened.add(piece.index)
        opening = self._format.opening(self._plan.choices[piece.index], piece, usage)
        return opening + self._format.chunk(piece, usage)

    async def _write_failure(self, events: EventStream, error: Exception) -> None:
        refusal = as_api_error(error)
        if refusal is None:
            logger.error(
                "stream failed unexpectedly",
                exc_info=error,
                extra={"fields": about_request(self._record.request_id, trace_id=self._record.trace_id)},
            )
            refusal = UNEXPECTED
        self._record.status, self._record.error = refusal.status, str(refusal)
        await events.finish(self._format.failure(refusal))

    def _usage(self) -> Usage:
        record = self._record
        return make_usage(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.output_tokens,
            cached_tokens=record.cached_tokens,
            reasoning_tokens=record.reasoning_tokens,
        )
