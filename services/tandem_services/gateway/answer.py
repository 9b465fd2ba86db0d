"""Answering a generation request: plan it, run it, write it. `answering` accounts for it.

    body ─▶ deadline ─▶ plan ─▶ job ─▶ pieces ─▶ whole JSON or events

Until the first piece exists nothing has been written, so an error until then has an HTTP status. After it,
an error is an event of the stream, which it ends.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tandem_engine.logs import about_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.answer_format import AnswerFormat, WholeChoice, make_usage, share_prompt_logprobs
from tandem_services.gateway.answering import Answering, new_record
from tandem_services.gateway.best_of import keep_best
from tandem_services.gateway.boundary import identify_request, identity_of
from tandem_services.gateway.choice_text import ChoicePiece
from tandem_services.gateway.disconnect import run_until_disconnect
from tandem_services.gateway.error_responses import UNEXPECTED, as_api_error
from tandem_services.gateway.generation import Generator, Job
from tandem_services.gateway.model_catalog import ModelCatalog
from tandem_services.gateway.openai_answers import Usage
from tandem_services.gateway.plan import GenerationPlan
from tandem_services.gateway.read_model import ReadModel
from tandem_services.gateway.request_body import decode_body, read_body
from tandem_services.gateway.sse import EventStream, send_json
from tandem_services.gateway.tokenizer_threads import TokenizerThreads

logger = logging.getLogger(__name__)


class ModelRequest(Protocol):
    """A decoded body that says which model is to answer, and how soon."""

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
        """Seconds that the client wants to wait at most."""
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
        serving = self._serve(await read_body(Request(scope, receive)), scope, send)
        await run_until_disconnect(serving, receive)

    async def _serve(self, body: bytes, scope: Scope, send: Send) -> None:
        request = await decode_body(self._planner.decode, body)
        del body  # a request may run for minutes
        identify_request(scope, request.request_id or request.rid)
        served = self._models.of_request(scope, request.model)
        request.model = request.model or served.model.name
        identity = identity_of(scope)
        caller = identity.caller
        deadline = self._shared.deadline(identity, request.timeout)
        async with self._shared.bounded(deadline):
            plan = (await self._planner.plan(request, served, caller)).owned_by(caller)
        identity.body.release()
        record = new_record(
            identity,
            endpoint=self._planner.endpoint,
            requested_model=plan.model,
            prompt_tokens=plan.prompt_tokens,
            choices=len(plan.choices),
            n=plan.n,
            stream=plan.stream,
        )
        async with self._shared.accepted(record, identity, served.metrics, tokens=plan.expected_tokens):
            job = Job(
                plan=plan,
                record=record,
                arrived=identity.arrived,
                deadline=deadline,
                caller=caller,
                ticket=identity.ticket,
                trace=identity.trace,
            )
            answer_format = self._planner.format(plan, served, identity.request_id, record.created)
            answer = Answer(job, answer_format, served.generator, self._shared, send, served.prompts.threads)
            await (answer.stream() if plan.stream else answer.whole())


class Answer:
    """One answer being written."""

    def __init__(
        self,
        job: Job,
        answer_format: AnswerFormat,
        generator: Generator,
        shared: Answering,
        send: Send,
        threads: TokenizerThreads,
    ) -> None:
        self._job = job
        self._format = answer_format
        self._generator = generator
        self._shared = shared
        self._send = send
        self._threads = threads

    async def whole(self) -> None:
        """Gather everything, then answer once."""
        choices = [WholeChoice(index=c.index, texts=[c.echo or ""]) for c in self._job.plan.choices]
        async with self._shared.bounded(self._job.deadline):
            await self._gather(choices)
            share_prompt_logprobs(choices, self._job.plan.n)
            best = keep_best(choices, generated=self._job.plan.n, kept=self._job.plan.kept)
            body = await self._written(best, partial(self._format.whole, best, self._usage()))
        await send_json(self._send, 200, body)

    async def stream(self) -> None:
        """Answer while it is generated. Raises only before the first event."""
        async with EventStream(self._send) as events:
            try:
                async with self._shared.bounded(self._job.deadline):
                    await self._write_events(events)
            except Exception as error:  # the status is out: the client learns in the stream
                if not events.started:
                    raise
                await self._write_failure(events, error)
                return
            await events.finish(self._format.closing(self._usage()))

    async def _gather(self, choices: list[WholeChoice]) -> None:
        async with aclosing(self._generator.pieces(self._job)) as batches:
            async for batch in batches:
                for piece in batch:
                    choices[piece.index].add(piece)

    async def _write_events(self, events: EventStream) -> None:
        opened: set[int] = set()
        async with aclosing(self._generator.pieces(self._job)) as batches:
            async for batch in batches:
                await events.write(await self._written(batch, partial(self._batch_events, batch, opened)))

    async def _written(self, parts: Sequence[WholeChoice] | Sequence[ChoicePiece], write: Callable[[], bytes]) -> bytes:
        """Texts of all tokens of a prompt, and of what else they could have been, are not for the event loop."""
        entries = sum(len(part.prompt_logprobs) for part in parts if part.prompt_logprobs is not None)
        if not entries:
            return write()
        return await self._threads.run(write, characters=entries, refusable=False)

    def _batch_events(self, batch: Sequence[ChoicePiece], opened: set[int]) -> bytes:
        return b"".join([self._piece_events(piece, opened) for piece in batch])

    def _piece_events(self, piece: ChoicePiece, opened: set[int]) -> bytes:
        usage = self._usage() if self._job.plan.continuous_usage else None
        if piece.index in opened:
            return self._format.chunk(piece, usage)
        opened.add(piece.index)
        opening = self._format.opening(self._job.plan.choices[piece.index], piece, usage)
        return opening + self._format.chunk(piece, usage)

    async def _write_failure(self, events: EventStream, error: Exception) -> None:
        refusal = as_api_error(error)
        if refusal is None:
            logger.error(
                "stream failed unexpectedly",
                exc_info=error,
                extra={"fields": about_request(self._job.record.request_id, trace_id=self._job.record.trace_id)},
            )
            refusal = UNEXPECTED
        self._job.record.status, self._job.record.error = refusal.status, str(refusal)
        await events.finish(self._format.failure(refusal))

    def _usage(self) -> Usage:
        record = self._job.record
        return make_usage(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.output_tokens,
            cached_tokens=record.cached_tokens,
            reasoning_tokens=record.reasoning_tokens,
        )
