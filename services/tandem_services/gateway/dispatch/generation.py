"""Runs all choices of one request concurrently, converts tokens to text, and merges the pieces as they arrive.

Closing the iterator, or cancelling its consumer, aborts every choice on every worker. The first choice that fails fails
the request.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from tandem_engine.base.clock import Clock
from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import ApiError
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.dispatch.dispatcher import Dispatcher
from tandem_services.gateway.dispatch.plan import ChoiceRequest, GenerationPlan, PlannedChoice
from tandem_services.gateway.dispatch.sessions import remembered
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestRecord
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.observe.tracing import UNTRACED, RequestTrace
from tandem_services.gateway.output.choice_text import ChoiceFinish, ChoicePiece, ChoiceText
from tandem_services.gateway.output.structured_output import name_grammar_field
from tandem_services.gateway.output.token_sequence import Accepted
from tandem_services.gateway.queueing.shared_route import SharedRoute
from tandem_services.router.tickets import RouteTicket


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One accepted request: what to do, where to note it, and by when. Times are the gateway's clock."""

    plan: GenerationPlan
    record: RequestRecord
    arrived: float
    deadline: float
    caller: Caller
    ticket: RouteTicket
    trace: RequestTrace = UNTRACED


@dataclass(kw_only=True, slots=True)
class Generator:
    """Runs jobs. One per model service."""

    model: str
    """Its name among the workers."""
    dispatcher: Dispatcher
    vocabulary: Vocabulary
    clock: Clock
    metrics: GatewayMetrics

    def pieces(self, job: Job) -> AsyncGenerator[list[ChoicePiece], None]:
        """Pieces of all choices; each list is what has gathered since the last one. Close it when done."""
        if len(job.plan.choices) == 1:
            return self._choice(job, job.plan.choices[0], None)
        return self._merged(job)

    async def _merged(self, job: Job) -> AsyncGenerator[list[ChoicePiece], None]:
        arrived: asyncio.Queue[ChoicePiece | BaseException] = asyncio.Queue()
        routes = self._routes(job.plan)
        tasks = [
            asyncio.create_task(self._feed(job, choice, routes[choice.index // job.plan.n], arrived))
            for choice in job.plan.choices
        ]
        for task in tasks:
            task.add_done_callback(partial(_note_failure, arrived))
        unfinished = len(tasks)
        try:
            while unfinished:
                batch = await _gathered(arrived)
                unfinished -= sum(piece.finish is not None for piece in batch)
                yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _routes(self, plan: GenerationPlan) -> list[SharedRoute | None]:
        """One for each prompt that has several choices."""
        prompts = len(plan.choices) // plan.n
        if plan.n == 1:
            return [None] * prompts
        return [SharedRoute() for _ in range(prompts)]

    async def _feed(
        self,
        job: Job,
        choice: PlannedChoice,
        route: SharedRoute | None,
        arrived: "asyncio.Queue[ChoicePiece | BaseException]",
    ) -> None:
        async with aclosing(self._choice(job, choice, route)) as pieces:
            async for (piece,) in pieces:
                arrived.put_nowait(piece)

    async def _choice(
        self, job: Job, choice: PlannedChoice, route: SharedRoute | None
    ) -> AsyncGenerator[list[ChoicePiece], None]:
        """One piece at a time. A refused grammar is called by the name that the client used."""
        record = job.record.choices[choice.index]
        text = ChoiceText(
            choice.index,
            self.vocabulary,
            choice.sampling,
            skip_special_tokens=job.plan.skip_special_tokens,
            keep_stop=job.plan.keep_stop,
            reading=job.plan.reading,
            tells_ids=job.plan.tells_ids,
            interval=job.plan.stream_interval,
        )
        last_token_at: float | None = None
        scores: tuple[TokenLogprob | None, ...] | None = None
        try:
            async with aclosing(self._outputs(job, choice, route)) as outputs:
                async for accepted in outputs:
                    if accepted.token_ids:
                        last_token_at = self._time_tokens(job, record, last_token_at, len(accepted.token_ids))
                    scores = accepted.prompt_logprobs or scores
                    piece = text.absorb(accepted) if job.plan.generate else _prompt_alone(choice, accepted, scores)
                    # Tokens that are not written yet have been made all the same.
                    record.output_tokens = text.tokens
                    if piece is None:
                        continue
                    _note_piece(record, piece)
                    yield [piece]
                    if piece.finish is not None:
                        return
        except ApiError as error:
            name_grammar_field(error, job.plan.grammar_field)
            raise

    def _outputs(self, job: Job, choice: PlannedChoice, route: SharedRoute | None) -> AsyncGenerator[Accepted, None]:
        """What the workers send for one choice."""
        record = job.record.choices[choice.index]
        outputs = self.dispatcher.run(_choice_request(self.model, job, choice, route), record)
        if job.plan.turn is None:
            return outputs
        return remembered(outputs, job.plan.turn, prompt_tokens=len(choice.input_ids))

    def _time_tokens(self, job: Job, record: ChoiceRecord, last: float | None, count: int) -> float:
        now = self.clock.now()
        if last is None:
            record.ttft_s = now - job.arrived
        else:
            self.metrics.itl.observe((now - last) / count)
        return now


def _note_failure(arrived: "asyncio.Queue[ChoicePiece | BaseException]", task: "asyncio.Task[None]") -> None:
    """However a choice fails, it is raised where the choices are merged."""
    if not task.cancelled() and (error := task.exception()) is not None:
        arrived.put_nowait(error)


async def _gathered(arrived: "asyncio.Queue[ChoicePiece | BaseException]") -> list[ChoicePiece]:
    """At least one piece, and all that have arrived by now. Raises what a choice has raised."""
    batch: list[ChoicePiece] = []
    while not batch or not arrived.empty():
        item = await arrived.get()
        if isinstance(item, BaseException):
            raise item
        batch.append(item)
    return batch


def _choice_request(model: str, job: Job, choice: PlannedChoice, route: SharedRoute | None) -> ChoiceRequest:
    return ChoiceRequest(
        request_id=job.record.request_id,
        index=choice.index,
        model=model,
        input_ids=choice.input_ids,
        sampling=choice.sampling,
        cache_salt=job.plan.cache_salt,
        adapter=job.plan.adapter,
        session_key=job.plan.session_key,
        priority=job.plan.priority,
        group="" if route is None else f"{job.record.request_id}-{choice.index // job.plan.n}",
        route=route,
        ticket=job.ticket,
        turn=job.plan.turn,
        deadline=job.deadline,
        caller=job.caller,
        trace=job.trace,
    )


def _prompt_alone(
    choice: PlannedChoice, accepted: Accepted, scores: tuple[TokenLogprob | None, ...] | None
) -> ChoicePiece | None:
    """All of an answer without output. The one token that was computed to get there is dropped.

    None until the worker is done: to leave earlier would abort the transfer of the prompt's KV.
    """
    if accepted.finish is None:
        return None
    return ChoicePiece(choice.index, "", 0, [], ChoiceFinish("length", None), scores)


def _note_piece(record: ChoiceRecord, piece: ChoicePiece) -> None:
    record.reasoning_tokens = piece.reasoning_tokens
    if piece.finish is not None:
        record.finish_reason = piece.finish.reason
