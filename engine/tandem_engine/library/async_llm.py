"""`AsyncLLM`: concurrent requests for an application with an event loop.

    async with AsyncLLM("models/tandem-mini") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

A request is
    1. admitted   checked, and passed to the engine's thread; a full queue is an error at once
    2. growing    each item is the output so far. A reader that falls behind skips states and loses no token, so at most
                  one output is kept for it
    3. ended      finished, aborted, or failed with an error of `tandem_engine.base.errors`
       left       the generator is closed or its task canceled before: the request is aborted

`EngineThread` runs the scheduler loop of one engine on a separate thread, so nothing blocks the event loop.
    1. launch   on that thread, which owns the engine from then on; the caller waits for it, or gets its error
    2. loop     calls of other threads, then one step; when idle it sleeps until the next call
    3. end      on request, or on an error of the engine, which pending calls receive

Callers on any thread submit functions of the engine; nothing else crosses.
"""

import asyncio
import itertools
import logging
import queue
import secrets
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tandem_engine.base.errors import EngineError, EngineStoppedError, InvalidRequestError, QueueFullError
from tandem_engine.base.names import RequestId
from tandem_engine.engine import Engine
from tandem_engine.engine.launch import ProgressOption, launched_engine
from tandem_engine.library.adapters import LoRARequest, adapter_config
from tandem_engine.library.answer import Pending, error_of, make_answer, make_embedding_answer, serving_of
from tandem_engine.library.llm import config_from_options
from tandem_engine.library.model_source import with_folder
from tandem_engine.library.outputs import EmbeddingRequestOutput, RequestOutput
from tandem_engine.library.prompts import Conversation, Encoded, Prompt, Session, encode_conversations, encode_prompt
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import PoolingParams
from tandem_engine.messages.stats import EngineStats
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SLEEP = 0.05
"""Seconds between looks at deadlines while requests wait, as when generation is paused."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A caller's function to run on the engine's thread."""

    function: Callable[[Engine], None]
    refuse: Callable[[EngineStoppedError], None]
    """Called instead when the engine has ended."""


class EngineThread:
    """Owns the engine between construction and `close`."""

    def __init__(
        self, launch: Callable[[], AbstractContextManager[Engine]], *, on_failure: Callable[[EngineStoppedError], None]
    ) -> None:
        """Start, and wait until the engine that `launch` opens is there. Raises what that raises.

        `on_failure` is called on the thread when the engine stops by an error of its own.
        """
        self._launch = launch
        self._on_failure = on_failure
        self._submissions: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self._stopping = False
        self._ended: EngineStoppedError | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.result()

    def ask(self, function: Callable[[Engine], None]) -> None:
        """Have `function` called between two steps; it must not raise. Forgotten when the engine ends before.

        Raises `EngineStoppedError` when it has ended.
        """
        if self._ended is not None:
            raise self._ended
        self._put(Submission(function, refuse=lambda error: None))  # noqa: ARG005

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Have `function` called between two steps; what it returns or raises is the future's.

        The future raises `EngineStoppedError` when the engine has ended.
        """
        answer: Future[T] = Future()

        def run(engine: Engine) -> None:
            try:
                answer.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - the boundary: the caller's `result()` raises it
                answer.set_exception(error)

        self._put(Submission(run, refuse=answer.set_exception))
        return answer

    def close(self) -> None:
        """End after the current step and wait for it. Idempotent."""
        self._stopping = True
        # Wakes a thread that sleeps.
        self._put(Submission(lambda engine: None, refuse=lambda error: None))  # noqa: ARG005
        self._thread.join()

    def _put(self, submission: Submission) -> None:
        self._submissions.put(submission)
        # The thread may have ended since the last check, and would not run this.
        if self._ended is not None:
            self._refuse_all(self._ended)

    # On the thread.

    def _run(self) -> None:
        try:
            with self._launch() as engine:
                self._ready.set_result(None)
                self._turn_until_stopped(engine)
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                return
            logger.exception("engine stopped by an unexpected error")
            ended = EngineStoppedError(f"the engine has stopped: {type(error).__name__}: {error}")
            self._end(ended)
            self._on_failure(ended)
        else:
            self._end(EngineStoppedError("the engine was closed"))

    def _turn_until_stopped(self, engine: Engine) -> None:
        while not self._stopping:
            while not self._submissions.empty():
                self._submissions.get().function(engine)
            if not engine.step():
                self._sleep(engine)

    def _sleep(self, engine: Engine) -> None:
        """Until a caller submits something; not for long while weights load, or requests with deadlines wait."""
        try:
            submission = self._submissions.get(timeout=None if engine.dormant else MAX_SLEEP)
        except queue.Empty:
            return
        submission.function(engine)

    def _end(self, error: EngineStoppedError) -> None:
        self._ended = error
        self._refuse_all(error)

    def _refuse_all(self, error: EngineStoppedError) -> None:
        while True:
            try:
                self._submissions.get_nowait().refuse(error)
            except queue.Empty:
                return


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

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        progress: ProgressOption = True,
        **options: object,
    ) -> None:
        """Load the checkpoint in the folder `model`, and wait for it; arguments and errors as `LLM` has them.

        A function for `progress` is called on the engine's thread.
        """
        given = adapter_config(adapters, options)
        config = with_folder(config_from_options(model, options), model, progress=progress is True)
        self._config = replace(config, adapters=given)
        self._streams: dict[str, Stream] = {}
        """By the rid of every choice that has not ended."""
        self._numbers = itertools.count()
        self._thread = EngineThread(
            lambda: launched_engine(self._config, progress=progress, sink=self._deliver), on_failure=self._fail_all
        )
        self._serving = self._thread.call(lambda engine: serving_of(engine, self._config)).result()
        limits = self._config.scheduler
        self._most_streams = limits.max_queued_requests + limits.max_running_requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session: Session | None = None,
        lora_request: LoRARequest | None = None,
        parse_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, each time it has grown; the last one is `finished`.

        `request_id` names the request for `abort`; None makes one up. Leaving the loop aborts the request.
        `lora_request` names the adapter that computes it. With a `session` the prompt is only the new turn of its
        conversation, and `parse_special_tokens` says what special tokens in a text become, as in `LLM.generate`.

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
        [encoded] = self._serving.adapters.given([encoded], lora_request)
        async for output in self._stream(encoded, sampling_params, request_id):
            yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
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
        [encoded] = self._serving.adapters.given([encoded], lora_request)
        async for output in self._stream(encoded, sampling_params, request_id):
            yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt, as `LLM.embed`. Cancelling it aborts the request; errors as `generate` has them."""
        encoded = await asyncio.to_thread(encode_prompt, prompt, self._serving.text)
        [encoded] = self._serving.adapters.given([encoded], lora_request)
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
        """Compute nothing until `resume`; requests wait. `PauseMode` determines what happens to running ones."""
        await self._call(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """Resume after a pause."""
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
            # The loop was closed with readers on it: none is left to notify.
            for rid in [rid for rid, stream in self._streams.items() if stream.loop is loop]:
                self._streams.pop(rid, None)


def _take_all(news: Sequence[tuple[Stream, TokenOutput]]) -> None:
    for stream, output in news:
        stream.take(output)


def _raise_failure(stream: Stream) -> None:
    if stream.error is not None:
        raise stream.error
    failure = stream.answer.failure
    if failure is not None:
        raise error_of(failure)
