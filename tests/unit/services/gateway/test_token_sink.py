"""Tokens that are written on the reader's call stack: whatever comes in which order, the output is the same.

The real `Generator` and `Attempt`; engine and client are played. The oracle is `ChoiceText` with all tokens at once.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tandem_engine.messages.outputs import Finish, FinishReason, TokenOutput
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.metrics import MetricFamilies
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.dispatch.attempt import Attempt, AttemptFailedError, Side, TokenSink
from tandem_services.gateway.dispatch.choice_run import AcceptedRequest, ChoiceRun
from tandem_services.gateway.dispatch.engine_client import Pouring
from tandem_services.gateway.dispatch.generation import AT_ONCE, Generator
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestRecord
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.output.choice_text import ChoicePiece, ChoiceText
from tandem_services.gateway.output.token_sequence import Accepted, Consume
from tandem_testing.service_clock import ServiceClock
from tandem_testing.tokenizer_builders import EOS

TURNS = 4
LETTERS = "the quick brown fox é 漢字 🦊"
STOPS = ((), ("fox",), ("ick b", "zz"))


@dataclass
class Engine:
    """Stands for the connection to both workers: keeps the listeners of the attempt."""

    sides: list[Side] = field(default_factory=list)
    worker: Any = field(default_factory=lambda: SimpleNamespace(incarnation="w@1"))
    received_at = 0.0

    def submit(self, request: Any, side: Side) -> bool:
        self.sides.append(side)
        return True

    def forget(self, rid: str, *, abort: bool) -> None:
        pass


@dataclass
class Attempts:
    """Stands for the dispatcher: one attempt for each choice."""

    attempts: list[Attempt]
    started: list[int] = field(default_factory=list)
    """Choices, in the order in which they began."""
    passed: int = 0
    """Outputs that went through the task of a choice."""

    async def run(self, run: ChoiceRun, consume: Consume, sink: TokenSink | None = None) -> None:
        self.started.append(run.choice.index)
        while True:
            accepted = await self.attempts[run.choice.index].next(sink)
            self.passed += 1
            if await consume(accepted) or accepted.finish is not None:
                return


@dataclass
class Client:
    """Gets pieces from the generator and from the sink."""

    pieces: list[ChoicePiece] = field(default_factory=list)
    written: int = 0
    """Of them, by the sink."""
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """As long as it does, the sink may write."""
    fails: Exception | None = None
    ready: Callable[[], bool] | None = None
    """Instead of what it would say."""

    @property
    def is_ready(self) -> Callable[[], bool]:
        return self.ready or (lambda: self.reads.is_set() and bool(self.pieces))

    def write(self, piece: ChoicePiece) -> None:
        if self.fails is not None:
            raise self.fails
        self.pieces.append(piece)
        self.written += 1

    def plain(self, choice: int) -> Callable[[str], None]:
        return lambda text: self.write(ChoicePiece(choice, text, 0, [], None))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Stream:
    """Choices of one prompt being streamed."""

    def __init__(self, tokenizer, sampling: SamplingParams, *, choices: int = 1, returns_ids: bool = True) -> None:
        """Without ids, texts between the first and the last piece are written as they are."""
        self.engines, self.client = [Engine() for _ in range(choices)], Client()
        self.engine = self.engines[0]
        self.pouring: list[Pouring] = []
        self.client.reads.set()
        plan = GenerationPlan(
            model="m",
            choices=tuple(Choice(index=n, input_ids=(5,), sampling=sampling) for n in range(choices)),
            shows_logprobs=False,
            n=choices,
            kept=choices,
            stream=True,
            include_usage=False,
            continuous_usage=False,
            returns_ids=returns_ids,
        )
        records = [ChoiceRecord(index=n) for n in range(choices)]
        self.record = records[0]
        record = RequestRecord(
            request_id="r",
            client_request_id=None,
            endpoint="/v1/completions",
            model="m",
            requested_model="m",
            stream=True,
            prompt_tokens=1,
            n=choices,
            created=0,
            choices=records,
        )
        self.dispatcher = Attempts([Attempt("r", 0, record, began=0.0) for record in records])
        for engine, attempt in zip(self.engines, self.dispatcher.attempts, strict=True):
            for is_prefill in (False, True):
                attempt.submit(engine, None, is_prefill=is_prefill)  # type: ignore[arg-type]
        generator = Generator(
            dispatcher=self.dispatcher,  # type: ignore[arg-type]
            vocabulary=tokenizer.vocabulary,
            clock=ServiceClock(),
            metrics=GatewayMetrics(MetricFamilies(CollectorRegistry()), model="m"),
        )
        request = AcceptedRequest(plan=plan, record=record, arrived=0.0, deadline=1e9, caller=Caller())
        self.task = asyncio.create_task(self._consume(generator, request))

    async def _consume(self, generator: Generator, request: AcceptedRequest[GenerationPlan]) -> None:
        async def deliver(pieces: Sequence[ChoicePiece]) -> None:
            await self.client.reads.wait()
            self.client.pieces += pieces

        await generator.run(request, deliver, self.client)

    def send(
        self, output: TokenOutput, *, by_prefill: bool = False, choice: int = 0, more_follows: bool = False
    ) -> None:
        """`more_follows`: the reader has found further messages."""
        keeps = self.engines[choice].sides[by_prefill].on_output(output)
        if keeps is not None:
            self.pouring.append(keeps)
        if not more_follows:
            self.pour()

    def pour(self) -> None:
        for each in self.pouring:
            each.pour(0.0)
        self.pouring.clear()


async def turns(number: int = TURNS) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def expected(tokenizer, sampling: SamplingParams, ids: list[int], finish: Finish) -> ChoicePiece:
    text = ChoiceText(
        0, tokenizer.vocabulary, sampling, skip_special_tokens=True, keep_stop=False, returns_ids=True, interval=1
    )
    piece = text.absorb(Accepted(ids, [], finish))
    assert piece is not None
    return piece


def cuts(ids: list[int], lengths: list[int]) -> Iterator[TokenOutput]:
    """Outputs of these lengths, the last with the finish."""
    at = 0
    for length in [*lengths, len(ids)]:
        part = tuple(ids[at : at + length])
        last = at + length >= len(ids)
        finish = Finish(reason=FinishReason.LENGTH) if last else None
        yield TokenOutput(rid="r", index=at, token_ids=part, finish=finish)
        if last:
            return
        at += length


# A machine may stand still while an example is drawn.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.text(alphabet=LETTERS, min_size=1, max_size=24),
    lengths=st.lists(st.integers(1, 3), max_size=24),
    before=st.lists(
        st.sampled_from(["turn", "stop reading", "read", "late", "again", "leaving", "prefill", "together"]),
        max_size=40,
    ),
    stop=st.sampled_from(STOPS),
    returns_ids=st.booleans(),
)
def test_sink_and_generator_write_each_token_once(tokenizer, text, lengths, before, stop, returns_ids):
    ids = [*tokenizer.encode(text, add_special_tokens=False)]
    sampling = SamplingParams(max_tokens=len(ids), stop=stop)
    outputs = [*cuts(ids, lengths)]

    async def run() -> Stream:
        stream = Stream(tokenizer, sampling, returns_ids=returns_ids)
        await turns()
        held: list[TokenOutput] = []
        for number, output in enumerate(outputs):
            action = before[number] if number < len(before) else ""
            if action == "turn":
                stream.pour()
                await turns()
            elif action == "leaving":
                stream.send(TokenOutput(rid="r", index=output.index, leaving=True))
            elif action == "stop reading":
                stream.client.reads.clear()
            elif action == "read":
                stream.client.reads.set()
            if action == "late" and output.finish is None:
                held.append(output)
                continue
            by_prefill = action == "prefill" and output.finish is None
            stream.send(output, by_prefill=by_prefill, more_follows=action == "together")
            if action == "again":
                stream.send(output, by_prefill=True)
        for output in held:
            stream.send(output, by_prefill=True)
        stream.pour()
        stream.client.reads.set()
        await stream.task
        return stream

    stream = asyncio.run(run())
    whole = expected(tokenizer, sampling, ids, Finish(reason=FinishReason.LENGTH))
    assert stream.client.text == whole.text
    last = stream.client.pieces[-1]
    assert (last.finish, last.tokens) == (whole.finish, whole.tokens)
    sent = [token for piece in stream.client.pieces for token in piece.token_ids]
    assert sent == ([*whole.token_ids] if returns_ids else [])
    assert all(piece.finish is None for piece in stream.client.pieces[:-1])
    assert stream.record.output_tokens == whole.tokens


def one(index: int, token: int = 5) -> TokenOutput:
    return TokenOutput(rid="r", index=index, token_ids=(token,))


async def begun(tokenizer, **sampling) -> Stream:
    """A stream whose first token is out."""
    stream = Stream(tokenizer, SamplingParams(max_tokens=100, **sampling))
    await turns()
    stream.send(one(0))
    await turns()
    assert (len(stream.client.pieces), stream.client.written) == (1, 0)
    return stream


async def test_ordinary_token_is_written_before_the_call_returns(tokenizer):
    stream = await begun(tokenizer)
    for index in range(1, 4):
        stream.send(one(index))
        assert (len(stream.client.pieces), stream.client.written) == (index + 1, index)
    stream.task.cancel()


async def test_tokens_that_come_together_are_one_piece(tokenizer):
    stream = await begun(tokenizer)
    for index in range(1, 4):
        stream.send(one(index), more_follows=index < 3)
        assert stream.client.written == (index == 3)
    assert stream.client.pieces[-1].tokens == 4
    stream.task.cancel()


async def test_finish_behind_kept_tokens_comes_after_them(tokenizer):
    stream = await begun(tokenizer)
    stream.send(one(1), more_follows=True)
    stream.send(one(2), more_follows=True)
    finish = Finish(reason=FinishReason.STOP)
    stream.send(TokenOutput(rid="r", index=3, token_ids=(EOS,), finish=finish))
    assert (stream.client.written, stream.client.pieces[-1].tokens) == (1, 3)
    await stream.task
    assert stream.client.pieces[-1].finish is not None


async def test_loss_behind_kept_tokens_comes_after_them(tokenizer):
    stream = await begun(tokenizer)
    stream.send(one(1), more_follows=True)
    stream.engine.sides[0].on_lost()
    assert stream.client.written == 1
    with pytest.raises(AttemptFailedError):
        await stream.task


async def test_token_behind_a_queued_one_is_queued(tokenizer):
    stream = await begun(tokenizer)
    stream.client.reads.clear()
    stream.send(one(1))
    stream.client.reads.set()
    stream.send(one(2))
    assert stream.client.written == 0
    await turns()
    assert [piece.tokens for piece in stream.client.pieces] == [1, 3]
    stream.send(one(3))
    assert stream.client.written == 1
    stream.task.cancel()


async def test_token_after_the_cancellation_is_not_written(tokenizer):
    stream = await begun(tokenizer)
    stream.task.cancel()
    stream.send(one(1))
    assert stream.client.written == 0
    with pytest.raises(asyncio.CancelledError):
        await stream.task
    stream.send(one(2))
    assert stream.client.written == 0


async def test_error_of_the_sink_is_raised_in_the_task(tokenizer):
    stream = await begun(tokenizer)
    stream.client.fails = RuntimeError("cannot write")
    stream.send(one(1))
    stream.send(one(2))
    with pytest.raises(RuntimeError, match="cannot write"):
        await stream.task


async def test_error_behind_kept_tokens_is_raised_in_the_task(tokenizer):
    stream = await begun(tokenizer)
    stream.send(one(1), more_follows=True)

    def fail() -> bool:
        raise RuntimeError("cannot tell")

    stream.client.ready = fail
    stream.send(one(2))
    with pytest.raises(RuntimeError, match="cannot tell"):
        await stream.task


async def test_stop_string_in_the_sink_ends_the_choice(tokenizer):
    first, *others = tokenizer.encode("the fox jumps", add_special_tokens=False)
    stream = await begun(tokenizer, stop=("fox",))
    for index, token in enumerate([first, *others], start=1):
        stream.send(one(index, token))
    await stream.task
    assert stream.client.pieces[-1].finish is not None
    assert stream.client.pieces[-1].finish.stop == "fox"
    assert "fox" not in stream.client.text


async def test_lost_worker_after_written_tokens_is_a_failure(tokenizer):
    stream = await begun(tokenizer)
    stream.send(one(1))
    stream.engine.sides[0].on_lost()
    with pytest.raises(AttemptFailedError):
        await stream.task
    assert stream.client.written == 1


async def test_token_after_a_request_to_leave_is_left_to_the_task(tokenizer):
    """The dispatcher looks for another worker when it gets the next token."""
    stream = await begun(tokenizer)
    stream.send(TokenOutput(rid="r", index=1, leaving=True))
    await turns()
    stream.send(one(1))
    assert stream.client.written == 0
    await turns()
    assert [piece.tokens for piece in stream.client.pieces] == [1, 2]
    stream.task.cancel()


async def test_finish_is_left_to_the_generator(tokenizer):
    stream = await begun(tokenizer)
    stream.send(TokenOutput(rid="r", index=1, token_ids=(EOS,), finish=Finish(reason=FinishReason.STOP)))
    assert stream.client.written == 0
    await stream.task
    assert stream.client.pieces[-1].finish is not None


async def test_tokens_of_several_choices_wake_no_task_of_theirs(tokenizer):
    stream = Stream(tokenizer, SamplingParams(max_tokens=100), choices=3)
    await turns()
    for choice in range(3):
        stream.send(one(0), choice=choice)
    await turns()
    for index in range(1, 4):
        for choice in range(3):
            stream.send(one(index), choice=choice)
    await turns()
    assert stream.dispatcher.passed == 0
    by_choice = [[piece.tokens for piece in stream.client.pieces if piece.index == choice] for choice in range(3)]
    assert by_choice == [[1, 2, 3, 4]] * 3
    for choice in range(3):
        stream.send(
            TokenOutput(rid="r", index=4, token_ids=(EOS,), finish=Finish(reason=FinishReason.STOP)), choice=choice
        )
    await stream.task
    assert [piece.index for piece in stream.client.pieces[-3:]] == [0, 1, 2]


async def test_start_of_many_choices_lets_others_run(tokenizer):
    """A request of hundreds of choices does not keep the event loop until all have queried the router."""
    many = 16 * AT_ONCE
    stream = Stream(tokenizer, SamplingParams(max_tokens=100), choices=many)
    started = []
    while len(stream.dispatcher.started) < many:
        started.append(len(stream.dispatcher.started))
        await asyncio.sleep(0)
    steps = [after - before for before, after in pairwise([*started, many])]
    assert max(steps) <= AT_ONCE
    assert stream.dispatcher.started == [*range(many)]
    stream.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
