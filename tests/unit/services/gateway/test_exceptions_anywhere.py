"""An exception in any function of the gateway: clients get a response in its shape, and the next request is served.

Each function that serves a request on the event loop raises once (`tandem_testing.raised_anywhere`): those of the
gateway, and what it uses of other packages. A part of them is tried; all with TANDEM_EVERY_FUNCTION=1, which takes
minutes, and prints how many responses ended in which way.
"""

import asyncio
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import httpx
import pytest

import tandem_engine
import tandem_services
from tandem_testing.adapter_ports import adapter_ports
from tandem_testing.gateway_builders import EngineRack, LiveGateway
from tandem_testing.raised_anywhere import Fault, name_of, raising, recorded

FOLDERS = tuple(Path(package.__path__[0]) for package in (tandem_services, tandem_engine))
MOCKED = ("services/worker/", "engine/model/adapters/")
"""Modules of workers: the test's mocks run them in this process."""
SHARE = 1 if os.environ.get("TANDEM_EVERY_FUNCTION") else 16
"""Of the functions that run, every so many-th is tried, and each of ONCE_BROKEN and WRITTEN_AT_ONCE."""

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "mock", "messages": MESSAGES, "max_tokens": 4}
TEXT = {"model": "mock", "prompt": "hi", "max_tokens": 4}
WRITTEN = {"model": "mock", "input": "hi", "max_output_tokens": 4}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER["parameters"]}}
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "n": 2},
    ),
    "completion": ("POST", "/v1/completions", {**TEXT, "logprobs": 1, "stop": ["zz"], "request_id": "known"}),
    "long prompt": ("POST", "/v1/completions", {**TEXT, "prompt": "hi " * 200}),
    "completion stream": ("POST", "/v1/completions", {**TEXT, "prompt": ["hi", "ho"], "stream": True}),
    "plain stream": ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 12, "stream": True}),
    "message": ("POST", "/v1/messages", CHAT),
    "message stream": ("POST", "/v1/messages", {**CHAT, "stream": True}),
    "response": ("POST", "/v1/responses", WRITTEN),
    "response stream": ("POST", "/v1/responses", {**WRITTEN, "stream": True}),
    "count of a message": ("POST", "/v1/messages/count_tokens", CHAT),
    "tools": ("POST", "/v1/chat/completions", {**CHAT, "tools": TOOLS}),
    "tools stream": ("POST", "/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}),
    "schema": ("POST", "/v1/chat/completions", {**CHAT, "response_format": SCHEMA}),
    "response of tools": ("POST", "/v1/responses", {**WRITTEN, "tools": [{"type": "function", **WEATHER}]}),
    "embedding": ("POST", "/v1/embeddings", {"model": "mock", "input": ["hi", "ho"]}),
    "open session": ("POST", "/v1/sessions", {"session_id": "s"}),
    "turn": ("POST", "/v1/completions", {**TEXT, "session_params": {"id": "s"}}),
    "close session": ("DELETE", "/v1/sessions/s", None),
    "explain": ("GET", "/v1/requests/known/explain", None),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/mock", None),
    "ready": ("GET", "/ready", None),
    "ping": ("POST", "/ping", None),
    "load": ("GET", "/load", None),
    "openapi": ("GET", "/openapi.json", None),
    "wrong path": ("GET", "/v1/chat", None),
    "detokenize": ("POST", "/detokenize", {"model": "mock", "tokens": [5, 6]}),
    "tokenize": ("POST", "/tokenize", {"model": "mock", "prompt": "hi"}),
    "load adapter": ("POST", "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "one"}),
    "unload adapter": ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}),
    "bad request": ("POST", "/v1/chat/completions", {"model": "mock", "messages": "x"}),
}
LAST_EVENTS = {
    "/v1/chat/completions": ("data: [DONE]",),
    "/v1/completions": ("data: [DONE]",),
    "/v1/messages": ("event: message_stop", "event: error"),
    "/v1/responses": (
        "event: response.completed",
        "event: response.incomplete",
        "event: response.failed",
        "event: error",
    ),
}
OUTERMOST = {
    "app:UserApp.__call__",
    "connection:GatewayConnection.data_received",
    "middleware:RequestBoundary.__call__",
    "tokenizer_threads:TokenizerThreads._next_iteration",
    "tokenizer_threads:_deliver",
}
"""Boundaries themselves: what the event loop or the HTTP server calls. They do nothing but choose and catch."""

ONCE_BROKEN = {
    "connection:GatewayConnection._receive",
    "connection:GatewayConnection.answering",
    "middleware:RequestBoundary._identify",
    "middleware:RequestIdentity.public_id",
    "middleware:_Answer.__init__",
    "interruption:Client.__enter__",
    "interruption:Limit.__exit__",
    "middleware:RequestIdentity.header",
    "tracing:client_context",
    "tracing:pass_on",
    "tokenizer_threads:_Job.deliver",
    "engine_client:EngineConnection._read",
    "engine_client:EngineConnection._deliver",
    "attempt:Side.on_output",
    "caller:Caller.headers",
    "errors:speaks_anthropic",
    "generation:_ChoiceOutput.run",
    "chat_answer:ChatFormat.closing",
    "completions:CompletionFormat.closing",
    "answers:MessagesFormat.closing",
    "answers:ResponsesFormat.closing",
    "sse:EventStream.finish",
}
"""After an exception in one of these, clients got plain text, no response, or waited until they gave up."""

WRITTEN_AT_ONCE = {
    "attempt:Attempt.pour",
    "response_bytes:ResponseBytes.write",
    "dispatcher:_Pouring.take",
    "generation:_ChoiceOutput.take",
    "sse:EventStream.is_ready",
}
"""Functions of tokens that come while a stream waits for them."""

STEP_S = 0.002
"""Between two tokens, so that most come so."""

MORE_STREAMS = 50
"""At most, until all of them have run."""

TRIES, TRY_S = 500, 0.02
"""For a request after an exception that has cost the connection to the only worker."""

LIMIT_S = 60.0
"""For one response; a wait for more is a client that waits for nothing."""


@pytest.fixture
async def gateway(gateway: LiveGateway) -> AsyncIterator[LiveGateway]:
    """With a worker that loads adapters."""
    async with adapter_ports(gateway.chooser):
        yield gateway


async def ask(gateway: LiveGateway, name: str) -> httpx.Response:
    method, path, body = REQUESTS[name]
    async with asyncio.timeout(LIMIT_S):
        headers = {"authorization": f"Bearer {gateway.order_token}"} if "lora_adapter" in path else {}
        return await gateway.http.request(method, path, json=body, headers=headers)


def fault_of(response: httpx.Response) -> str | None:
    """What is wrong with the shape of a response, if anything."""
    path = response.request.url.path
    kind = response.headers.get("content-type", "")
    if response.is_error:
        if kind != "application/json":
            return f"{response.status_code} of type {kind}"
        error = response.json()
        fits = error.get("type") == "error" if path.startswith("/v1/messages") else set(error["error"]) == OPENAI_ERROR
        return None if fits else f"error {error}"
    if kind.startswith("text/event-stream"):
        last = response.text.rstrip("\n").split("\n\n")[-1]
        return None if last.startswith(LAST_EVENTS[path]) else f"stream ends with {last[:80]!r}"
    return None if kind == "application/json" and response.json() else f"200 of type {kind}"


OPENAI_ERROR = {"message", "type", "param", "code"}


def outcome_of(response: httpx.Response) -> str:
    """Status, and for a stream whether its last event is an error."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.status_code)
    last = response.text.rstrip("\n").split("\n\n")[-2:]
    failed = any("error" in event.partition("data: ")[2][:80] or "response.failed" in event for event in last)
    return f"{response.status_code}, a stream that ends with {'an error' if failed else 'its last event'}"


def is_served(code: CodeType) -> bool:
    return not any(part in code.co_filename for part in MOCKED) and name_of(code) not in OUTERMOST


async def fault_of_next(gateway: LiveGateway, name: str) -> str | None:
    """What is wrong with the next response. Until the only worker has answered a ping, its requests get a 503."""
    response = await ask(gateway, name)
    for _ in range(TRIES):
        if response.status_code != 503 or "retry-after" not in response.headers:
            break
        await asyncio.sleep(TRY_S)
        response = await ask(gateway, name)
    return fault_of(response) or (f"then {response.status_code}" if response.is_server_error else None)


async def functions_of(gateway: LiveGateway) -> dict[CodeType, str]:
    """Functions that serve a request, each with a request that it serves."""
    found: dict[CodeType, str] = {}
    for name in REQUESTS:
        await record(gateway, name, found)
    # Where this process was stopped, all tokens have come at once.
    for _ in range(MORE_STREAMS):
        if set(map(name_of, found)) >= WRITTEN_AT_ONCE:
            break
        await record(gateway, "plain stream", found)
    return found


async def record(gateway: LiveGateway, name: str, found: dict[CodeType, str]) -> None:
    """Add functions that serve the request `name`, and no other one before."""
    await ask(gateway, name)
    with recorded(*FOLDERS) as seen:
        fault = fault_of(await ask(gateway, name))
    assert fault is None, (name, fault)
    for code in filter(is_served, seen):
        found.setdefault(code, name)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Records of errors would keep tracebacks, and with them coroutines, until the end of all tests."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_exception_in_any_function_has_a_shape(
    gateway: LiveGateway, rack: EngineRack, capsys: pytest.CaptureFixture[str]
) -> None:
    rack.engines[0].behavior.step_s = STEP_S
    functions = await functions_of(gateway)
    always, names = ONCE_BROKEN | WRITTEN_AT_ONCE, {name_of(code) for code in functions}
    assert names >= always, f"not called any more: {sorted(always - names)}"
    assert len(functions) > 600
    wrong, outcomes = [], Counter[str]()
    for number, (code, name) in enumerate(functions.items()):
        if number % SHARE and name_of(code) not in always:
            continue
        try:
            with raising(Fault(code=code)) as planted:
                response = await ask(gateway, name)
            fault = fault_of(response)
            outcomes[outcome_of(response) if planted.fell else "did not run again"] += 1
            fault = fault or await fault_of_next(gateway, name)
        except (httpx.HTTPError, TimeoutError) as error:
            fault = repr(error)
        if fault is not None and planted.fell:
            wrong.append(f"{name_of(code)}, {name}: {fault}")
    # Coroutines that were handed to a function that raised: not at the end of another test.
    gc.collect()
    if SHARE == 1:
        with capsys.disabled():
            sys.stdout.write(f"{len(functions)} functions: {dict(outcomes.most_common())}\n")
    assert not wrong, "\n".join(wrong)
