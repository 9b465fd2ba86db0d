"""`AsyncLLM`: requests that come and go while others run, for an application with an event loop.

    async with AsyncLLM("models/tandem-mini") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Life of a request
    1. admitted   checked, and handed to the engine's thread; a full queue is an error at once
    2. growing    each item is the output so far. A reader that falls behind skips states and loses no token, so
                  what is kept for it never exceeds one output
    3. ended      finished, aborted, or failed with an error of `tandem_engine.errors`
       left       the generator is closed or its task cancelled before: the request is aborted

The model computes on a thread of its own (`EngineThread`); nothing here blocks the event loop.
"""

import asyncio
import itertools
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tandem_engine.engine import Engine
from tandem_engine.errors import EngineError, EngineStoppedError, InvalidRequestError, QueueFullError
from tandem_engine.launch import launched_engine
from tandem_engine.library.answer import Serving, make_answer
from tandem_engine.library.embedding import make_embedding_answer
from tandem_engine.library.engine_thread import EngineThread
from tandem_engine.library.failure import error_of
from tandem_engine.library.options import config_from_options
from tandem_engine.library.outputs import EmbeddingRequestOutput, RequestOutput
from tandem_engine.library.pending import Pending
from tandem_engine.library.prompts import Conversation, Encoded, Prompt, encode_conversations, encode_prompt
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.library.session import Session
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.engine_stats import EngineStats
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.pooling import PoolingParams
from tandem_engine.names import RequestId
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, eq=False)
class Stream:
    """One request and its reader. Belongs to the reader's event loop."""

    answer: Pending
    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)
    error: EngineError | None = None

    def take(self, output: TokenOutput) -> None:
        self.answer.take(output)
        self.news.set()

    def fail(self, error: EngineError) -> None:
        self.error = self.error or error
        self.news.set()


class AsyncLLM:
    """A model that answers requests as they come. Use from any number of event loops."""

    def __init__(self, model: str | Path, *, progress: bool = True, **options: object) -> None:
        """Load the checkpoint in the folder `model`, and wait for it; arguments and errors as `LLM` has them."""
        self._config = config_from_options(model, dict(options))
        self._streams: dict[str, Stream] = {}
        """By the rid of every choice that has not ended."""
        self._numbers = itertools.count()
        self._thread = EngineThread(
            lambda: launched_engine(self._config, progress=progress, sink=self._deliver), on_failure=self._fail_all
        )
        self._serving = self._thread.call(_serving).result()
        limits = self._config.scheduler
        self._most_streams = limits.max_queued_requests + limits.max_running_requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session: Session | None = None,
        parse_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, each time it has grown; the last one is `finished`.

        `request_id` names the request for `abort`; None makes one up. Leaving the loop aborts the request. With a
        `session` the prompt is only the new turn of its conversation, and `parse_special_tokens` says what special
        tokens in a text become, as in `LLM.generate`.

        Raises:
            InvalidRequestError: it can never be served; or `request_id` is that of a running request.
            SessionLostError: the engine forgot the session.
            SessionError: another turn of it is being computed.
            QueueFullError: too many are waiting.
            RequestFailedError: the engine gave it up.
            EngineStoppedError: the engine was closed or has failed.
        """
        encoded = await asyncio.to_thread(
            encode_prompt, prompt, self._serving.text, session, parse_special_tokens=parse_special_tokens
        )
        async for output in self._stream(encoded, sampling_params, request_id):
            yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a conversation, through the model's chat template."""
        [encoded] = await asyncio.to_thread(
            encode_conversations,
            [messages],
            self._serving.text,
            add_generation_prompt=add_generation_prompt,
            template_variables=chat_template_kwargs,
        )
        async for output in self._stream(encoded, sampling_params, request_id):
            yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt, as `LLM.embed`. Cancelling it aborts the request; errors as `generate` has them."""
        encoded = await asyncio.to_thread(encode_prompt, prompt, self._serving.text)
        answer = make_embedding_answer(self._name(request_id), encoded, pooling_params or PoolingParams())
        async with aclosing(self._states(answer)) as states:
            async for _ in states:
                if answer.finished:
                    break
        return answer.output()

    def open_session(self, session_id: str | None = None) -> Session:
        """A conversation of which each `generate` brings only the new turn. None makes an id up."""
        return Session(id=session_id or secrets.token_hex(16), forget=self._close_session)

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets what there is, with finish_reason "abort". Unknown ids are ignored."""
        streams = [stream for stream in self._streams.values() if stream.answer.request_id == request_id]
        if streams:
            self._abort(streams[0].answer)

    async def pause(self, mode: PauseMode = PauseMode.IN_PLACE) -> None:
        """Compute nothing until `resume`; requests wait. `PauseMode` says what becomes of running ones."""
        await self._call(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._call(lambda engine: engine.resume())

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; returns the pages freed. Raises `BusyError` while requests hold KV."""
        return await self._call(lambda engine: engine.flush_cache())

    async def reload_weights(self, path: str | Path | None = None) -> None:
        """Replace the weights by those in `path`, or read the served folder again.

        They load beside the running requests. Those that have begun fail with a retryable `RequestFailedError`.
        Raises `CheckpointError` or `ConfigError`, and keeps the old ones, when they cannot serve here.
        """
        reload = await self._call(lambda engine: engine.reload(None if path is None else str(path)))
        await asyncio.wrap_future(reload)

    async def stats(self) -> EngineStats:
        """The engine's numbers."""
        return await self._call(lambda engine: engine.stats())

    def get_tokenizer(self) -> TextTokenizer | None:
        """Of the checkpoint; None when it has none."""
        return self._serving.text

    async def close(self) -> None:
        """Stop; readers get `EngineStoppedError`. Idempotent."""
        self._fail_all(EngineStoppedError("the engine was closed"))
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # On a reader's event loop.

    async def _stream(
        self, prompt: Encoded, params: SamplingParams | None, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        answer = make_answer(self._name(request_id), prompt, params or SamplingParams(), self._serving)
        async with aclosing(self._states(answer)) as states:
            async for _ in states:
                # The answer may grow while the reader has this state: what it was shown decides, not what there is.
                output = answer.output()
                yield output
                if output.finished:
                    return

    def _name(self, request_id: str | None) -> str:
        return f"request-{next(self._numbers)}" if request_id is None else request_id

    async def _states(self, answer: Pending) -> AsyncGenerator[None, None]:
        """An item each time that `answer` has grown. Close it when done: that aborts what has not finished."""
        stream = Stream(answer=answer, loop=asyncio.get_running_loop())
        self._admit(stream)
        try:
            while True:
                await stream.news.wait()
                stream.news.clear()
                _raise_failure(stream)
                yield
        finally:
            for request in answer.requests:
                self._streams.pop(request.rid, None)
            if not answer.finished:
                self._abort(answer)

    def _admit(self, stream: Stream) -> None:
        answer = stream.answer
        if any(request.rid in self._streams for request in answer.requests):
            raise InvalidRequestError(f"request {answer.request_id!r} is running already", param="request_id")
        if len(self._streams) + len(answer.requests) > self._most_streams:
            raise QueueFullError(
                f"{len(self._streams)} requests are waiting or running, the limit is {self._most_streams}"
            )
        for request in answer.requests:
            self._streams[request.rid] = stream

        def add(engine: Engine) -> None:
            for request in answer.requests:
                engine.add(request)

        try:
            self._thread.ask(add)
        except EngineStoppedError:
            for request in answer.requests:
                del self._streams[request.rid]
            raise

    def _close_session(self, session_id: str) -> None:
        try:
            self._thread.ask(lambda engine: engine.close_session(session_id))
        except EngineStoppedError:
            return  # it has ended with its engine

    def _abort(self, answer: Pending) -> None:
        def abort(engine: Engine) -> None:
            for request in answer.requests:
                engine.abort(RequestId(request.rid))

        try:
            self._thread.ask(abort)
        except EngineStoppedError:
            return  # it has ended with its engine

    async def _call(self, function: Callable[[Engine], T]) -> T:
        answer: Future[T] = self._thread.call(function)
        return await asyncio.wrap_future(answer)

    # On the engine's thread.

    def _deliver(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        """Hand the outputs of one step to their readers' loops, in one go per loop."""
        del client  # readers are told apart by rid
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, TokenOutput]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.rid)
            if stream is not None:
                by_loop[stream.loop].append((stream, output))
        for loop, news in by_loop.items():
            self._on_loop(loop, partial(_take_all, news))

    def _fail_all(self, error: EngineStoppedError) -> None:
        for stream in tuple(self._streams.values()):
            self._on_loop(stream.loop, partial(stream.fail, error))

    def _on_loop(self, loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:
            # The loop was closed with readers on it: nobody is left to tell.
            for rid in [rid for rid, stream in self._streams.items() if stream.loop is loop]:
                self._streams.pop(rid, None)


def _serving(engine: Engine) -> Serving:
    return Serving(text=engine.text, max_request_tokens=engine.scheduler.max_request_tokens)


def _take_all(news: Sequence[tuple[Stream, TokenOutput]]) -> None:
    for stream, output in news:
        stream.take(output)


def _raise_failure(stream: Stream) -> None:
    if stream.error is not None:
        raise stream.error
    failure = stream.answer.failure
    if failure is not None:
        raise error_of(failure)
