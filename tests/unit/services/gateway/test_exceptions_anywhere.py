"""An exception in any function of the gateway: clients get a response in its shape, and the next request is served.

Each function that serves a request raises once (`tandem_testing.raised_anywhere`). A part of them is tried; all with
TANDEM_EVERY_FUNCTION=1, which takes minutes.
"""

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import httpx
import pytest

import tandem_services.gateway
from tandem_testing.adapter_ports import adapter_ports
from tandem_testing.gateway_builders import EngineRack, LiveGateway
from tandem_testing.raised_anywhere import Fault, name_of, raising, recorded

FOLDER = Path(tandem_services.gateway.__file__).parent
SHARE = 1 if os.environ.get("TANDEM_EVERY_FUNCTION") else 12
"""Of the functions that run, every so many-th is tried, and each of ONCE_BROKEN."""

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "mock", "messages": MESSAGES, "max_tokens": 4}
TEXT = {"model": "mock", "prompt": "hi", "max_tokens": 4}
WRITTEN = {"model": "mock", "input": "hi", "max_output_tokens": 4}
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "n": 2},
    ),
    "completion": ("POST", "/v1/completions", {**TEXT, "logprobs": 1, "stop": ["zz"]}),
    "long prompt": ("POST", "/v1/completions", {**TEXT, "prompt": "hi " * 200}),
    "completion stream": ("POST", "/v1/completions", {**TEXT, "prompt": ["hi", "ho"], "stream": True}),
    "plain stream": ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 12, "stream": True}),
    "message": ("POST", "/v1/messages", CHAT),
    "message stream": ("POST", "/v1/messages", {**CHAT, "stream": True}),
    "response": ("POST", "/v1/responses", WRITTEN),
    "response stream": ("POST", "/v1/responses", {**WRITTEN, "stream": True}),
    "models": ("GET", "/v1/models", None),
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
    "generation:Generator._feed",
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
        fits = error.get("type") == "error" if path == "/v1/messages" else set(error["error"]) == OPENAI_ERROR
        return None if fits else f"error {error}"
    if kind.startswith("text/event-stream"):
        last = response.text.rstrip("\n").split("\n\n")[-1]
        return None if last.startswith(LAST_EVENTS[path]) else f"stream ends with {last[:80]!r}"
    return None if kind == "application/json" and response.json() else f"200 of type {kind}"


OPENAI_ERROR = {"message", "type", "param", "code"}


async def functions_of(gateway: LiveGateway) -> dict[CodeType, str]:
    """Functions that serve a request, each with a request that it serves."""
    found: dict[CodeType, str] = {}
    names = iter(REQUESTS)
    # Where this process was stopped, all tokens have come at once.
    while (name := next(names, "plain stream" if WRITTEN_AT_ONCE - set(map(name_of, found)) else None)) is not None:
        await ask(gateway, name)
        with recorded(FOLDER) as seen:
            fault = fault_of(await ask(gateway, name))
        assert fault is None, (name, fault)
        for code in seen:
            found.setdefault(code, name)
    return found


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Records of errors would keep tracebacks, and with them coroutines, until the end of all tests."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_exception_in_any_function_has_a_shape(gateway: LiveGateway, rack: EngineRack) -> None:
    rack.engines[0].behaviour.step_s = STEP_S
    functions = {code: name for code, name in (await functions_of(gateway)).items() if name_of(code) not in OUTERMOST}
    names = {name_of(code) for code in functions}
    assert names >= ONCE_BROKEN, f"not called any more: {sorted(ONCE_BROKEN - names)}"
    assert len(functions) > 300
    wrong = []
    for number, (code, name) in enumerate(functions.items()):
        if number % SHARE and name_of(code) not in ONCE_BROKEN | WRITTEN_AT_ONCE:
            continue
        try:
            with raising(Fault(code=code)) as planted:
                fault = fault_of(await ask(gateway, name))
            after = await ask(gateway, name)
            fault = fault or fault_of(after) or (f"then {after.status_code}" if after.is_server_error else None)
        except (httpx.HTTPError, TimeoutError) as error:
            fault = repr(error)
        if fault is not None and planted.fell:
            wrong.append(f"{name_of(code)}, {name}: {fault}")
    # Coroutines that were handed to a function that raised: not at the end of another test.
    gc.collect()
    assert not wrong, "\n".join(wrong)
