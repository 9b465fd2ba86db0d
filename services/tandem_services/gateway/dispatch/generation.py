"""Runs all choices of one request concurrently, converts tokens to text, and merges the pieces as they arrive.

Cancelling it aborts every choice on every worker. The first choice that fails fails the request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from tandem_engine.base.clock import Clock
from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import ApiError
from tandem_services.gateway.dispatch.choice_run import AcceptedRequest, ChoiceRun
from tandem_services.gateway.dispatch.dispatcher import Dispatcher
from tandem_services.gateway.dispatch.plan import GenerationPlan
from tandem_services.gateway.dispatch.sessions import remembered
from tandem_services.gateway.observe.explain import ChoiceRecord
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.output.choice_text import ChoiceFinish, ChoicePiece, ChoiceText
from tandem_services.gateway.output.structured_output import name_grammar_field
from tandem_services.gateway.output.token_sequence import Accepted
from tandem_services.gateway.queueing.shared_route import SharedRoute

Deliver: TypeAlias = Callable[[Sequence[ChoicePiece]], Awaitable[None]]
"""Takes pieces of one request, in order of each choice."""


class PieceWriter(Protocol):
    """Writes pieces at once, while the run waits for the next ones. Must not block."""

    @property
    def is_ready(self) -> Callable[[], bool]:
        """Whether `write` can write now. Otherwise they are delivered."""
        ...

    def write(self, piece: ChoicePiece) -> None: ...

    def plain(self, choice: int) -> Callable[[str], None] | None:
        """Writes pieces of this choice, which has begun, that are nothing but text. None: all go to `write`."""
        ...


@dataclass(slots=True)
class _Merging:
    """Where the pieces of a request's choices meet. Implements `PieceWriter`, so that an ordinary token wakes no task
    of its choice."""

    arrived: "asyncio.Queue[ChoicePiece | BaseException]"

    @property
    def is_ready(self) -> Callable[[], bool]:
        return _always

    def write(self, piece: ChoicePiece) -> None:
        self.arrived.put_nowait(piece)

    async def deliver(self, pieces: Sequence[ChoicePiece]) -> None:
        for piece in pieces:
            self.arrived.put_nowait(piece)

    def plain(self, choice: int) -> None:
        """Others of the same request are merged with it."""

    def note_failure(self, task: "asyncio.Task[None]") -> None:
        """However a choice fails, it is raised where the choices are merged."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.arrived.put_nowait(error)

    async def gathered(self) -> list[ChoicePiece]:
        """At least one piece, and all that have arrived by now. Raises what a choice has raised."""
        batch: list[ChoicePiece] = []
        while not batch or not self.arrived.empty():
            item = await self.arrived.get()
            if isinstance(item, BaseException):
                raise item
            batch.append(item)
        return batch


def _always() -> bool:
    return True


AT_ONCE = 8
"""Choices of one request that start before the event loop serves others, and that arrive in the queue at the same time.
A request may have hundreds."""


@dataclass(kw_only=True, slots=True)
class Generator:
    """Runs requests. One per model service."""

    dispatcher: Dispatcher
    vocabulary: Vocabulary
    clock: Clock
    metrics: GatewayMetrics

    def run(
        self, request: AcceptedRequest[GenerationPlan], deliver: Deliver, writer: PieceWriter | None = None
    ) -> Awaitable[None]:
        """`deliver` gets pieces of all choices, each time what has gathered since the last. Cancel it to abort.

        Ordinary pieces of a single choice may go to `writer` instead, while the run waits for the next ones. Those of
        several choices are merged on the call stack of the connection's reader.

        Raises `ApiError`, and what `deliver` raises.
        """
        if len(request.plan.choices) > 1:
            return self._merged(request, deliver)
        run = ChoiceRun(request=request, choice=request.plan.choices[0], record=request.record.choices[0])
        return _ChoiceOutput(self, request.plan, run, deliver, writer).run()

    async def _merged(self, request: AcceptedRequest[GenerationPlan], deliver: Deliver) -> None:
        merging = _Merging(asyncio.Queue())
        tasks: list[asyncio.Task[None]] = []
        unfinished = len(request.plan.choices)
        try:
            for run in _runs(request):
                if tasks and len(tasks) % AT_ONCE == 0:
                    await asyncio.sleep(0)
                output = _ChoiceOutput(self, request.plan, run, merging.deliver, merging)
                task = asyncio.create_task(output.run())
                task.add_done_callback(merging.note_failure)
                tasks.append(task)
            while unfinished:
                batch = await merging.gathered()
                unfinished -= sum(piece.finish is not None for piece in batch)
                await deliver(batch)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _runs(request: AcceptedRequest[GenerationPlan]) -> Iterator[ChoiceRun]:
    """Of all its choices. Those of one prompt share a route."""
    plan, arrivals = request.plan, asyncio.Semaphore(AT_ONCE)
    group = ""
    route: SharedRoute | None = None
    for choice in plan.choices:
        if plan.n > 1 and choice.index % plan.n == 0:
            group, route = f"{request.record.request_id}-{choice.index // plan.n}", SharedRoute()
        record = request.record.choices[choice.index]
        yield ChoiceRun(request=request, choice=choice, record=record, group=group, route=route, arrivals=arrivals)


class _ChoiceOutput:
    """The output of one choice, from tokens to pieces. Implements `TokenSink`."""

    def __init__(
        self, generator: Generator, plan: GenerationPlan, run: ChoiceRun, deliver: Deliver, writer: PieceWriter | None
    ) -> None:
        self._generator = generator
        self._plan = plan
        self._run = run
        self._deliver = deliver
        self._writer = writer
        self._record = run.record
        self._text = ChoiceText(
            run.choice.index,
            generator.vocabulary,
            run.choice.sampling,
            skip_special_tokens=plan.skip_special_tokens,
            keep_stop=plan.keep_stop,
            reading=plan.reading,
            returns_ids=plan.returns_ids,
            interval=plan.stream_interval,
        )
        self._first_token_at = 0.0
        self._last_token_at: float | None = None
        self._observe_gap = generator.metrics.itl.observe
        self._scores: tuple[TokenLogprob | None, ...] | None = None
        self._plain: Callable[[str], None] | None = None
        """Writes pieces that are nothing but text, once that is known to be all that comes before the end."""
        self._last_piece: ChoicePiece | None = None
        """What a stop string has completed on the way to `writer`: it ends the run."""

    async def run(self) -> None:
        """Until its end. An error about the grammar calls it by the name that the client used."""
        dispatcher, turn = self._generator.dispatcher, self._plan.turn
        try:
            if turn is None:
                # A writer gets what is generated.
                sink = self if self._writer is not None and self._plan.generate else None
                await dispatcher.run(self._run, self._take_accepted, sink)
            else:
                # Each output is written into the session's record.
                run = partial(dispatcher.run, self._run)
                prompt_tokens = len(self._run.choice.input_ids)
                await remembered(run, self._take_accepted, turn, prompt_tokens=prompt_tokens)
        except ApiError as error:
            name_grammar_field(error, self._plan.grammar_field)
            raise

    @property
    def is_ready(self) -> Callable[[], bool]:
        assert self._writer is not None, "it may write"
        return self._writer.is_ready

    def take(self, token_ids: list[int], at: float) -> bool:
        """False: the output has ended."""
        if self._plain is None:
            return self._take_piece(token_ids, at)
        assert self._last_token_at is not None, "a first piece was written"
        self._observe_gap((at - self._last_token_at) / len(token_ids))
        self._last_token_at = at
        text = self._text.absorb_plain(token_ids)
        self._record.output_tokens = self._text.tokens
        if text:
            self._plain(text)
        return True

    def _take_piece(self, token_ids: list[int], at: float) -> bool:
        assert self._writer is not None, "it may write"
        piece = self._absorb(Accepted(token_ids, [], None), at)
        if piece is None:
            return True
        if piece.finish is not None:
            self._last_piece = piece
            return False
        self._writer.write(piece)
        if self._text.is_plain:
            self._plain = self._writer.plain(self._run.choice.index)
        return True

    async def _take_accepted(self, accepted: Accepted) -> bool:
        """`Consume`: deliver what they add, unless all new text is held back."""
        piece = self._last_piece
        if piece is None:
            piece = self._absorb(accepted, self._generator.clock.now())
        if piece is None:
            return False
        await self._deliver((piece,))
        return piece.finish is not None

    def _absorb(self, accepted: Accepted, at: float) -> ChoicePiece | None:
        if accepted.token_ids:
            self._time_tokens(len(accepted.token_ids), at)
        self._scores = accepted.prompt_logprobs or self._scores
        if self._plan.generate:
            piece = self._text.absorb(accepted)
        else:
            piece = _prompt_alone(self._run.choice.index, accepted, self._scores)
        # Tokens that are not written yet have been made all the same.
        self._record.output_tokens = self._text.tokens
        if piece is not None:
            _note_piece(self._record, piece)
            if piece.finish is not None and self._last_token_at is not None and self._text.tokens > 1:
                self._record.itl_s = (self._last_token_at - self._first_token_at) / (self._text.tokens - 1)
        return piece

    def _time_tokens(self, count: int, at: float) -> None:
        if self._last_token_at is None:
            self._record.ttft_s, self._first_token_at = at - self._run.request.arrived, at
        else:
            self._observe_gap((at - self._last_token_at) / count)
        self._last_token_at = at


def _prompt_alone(index: int, accepted: Accepted, scores: tuple[TokenLogprob | None, ...] | None) -> ChoicePiece | None:
    """All of an answer without output. The one token that was computed to get there is dropped.

    None until the worker is done: to leave earlier would abort the transfer of the prompt's KV.
    """
    if accepted.finish is None:
        return None
    return ChoicePiece(index, "", 0, [], ChoiceFinish("length", None), scores)


def _note_piece(record: ChoiceRecord, piece: ChoicePiece) -> None:
    record.reasoning_tokens = piece.reasoning_tokens
    if piece.finish is not None:
        record.finish_reason = piece.finish.reason
