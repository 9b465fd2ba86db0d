"""Every operation of the API port with its request, its responses and its errors.

A test compares this list with the routes of the application, and its request bodies with the application's decoders.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from tandem_engine.messages.requests import MAX_SESSION_BYTES
from tandem_services.common.health import HealthReport
from tandem_services.gateway.api.adapters import LoadAdapterRequest, UnloadAdapterRequest
from tandem_services.gateway.api.anthropic.schemas import CountedTokens, MessageEvent, MessageObject, MessagesRequest
from tandem_services.gateway.api.embeddings import EmbeddingRequest, EmbeddingResponse
from tandem_services.gateway.api.openai_schemas import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from tandem_services.gateway.api.responses.schemas import ResponseEvent, ResponseObject, ResponsesRequest
from tandem_services.gateway.api.sessions import ClosedSession, CloseRequest, OpenedSession, OpenRequest
from tandem_services.gateway.http.monitoring_routes import Live, Load, Version
from tandem_services.gateway.limits import MAX_CACHE_SALT_CHARACTERS
from tandem_services.gateway.models.adapter_updates import AdapterChange
from tandem_services.gateway.models.model import ModelCard, ModelList
from tandem_services.gateway.objectives import MAX_MS, TPOT_HEADER, TTFT_HEADER
from tandem_services.gateway.observe.explain import RequestRecord

Schema = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """A stream of server-sent events, each with one `document` as its data."""

    document: type[msgspec.Struct]
    manner: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """`answer` is what status 200 brings: a type as JSON, or None for nothing."""

    method: str
    path: str
    """With parameters as OpenAPI writes them."""
    name: str
    """`operationId`: OpenAI's, where they have one."""
    summary: str
    request: type[msgspec.Struct] | None = None
    answer: Any
    events: Events | None = None
    errors: tuple[int, ...] = ()
    """In addition to those of any request."""
    parameters: tuple[Schema, ...] = ()
    unready: bool = False
    """Answers 503 with the same body while it is not ready."""
    plain_text: bool = False
    """The answer is text of Prometheus."""
    administrative: bool = False
    """It is on the port for administrators, where there is one."""


TIMEOUT: Schema = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Seconds until the answer must be there.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}

SLO: tuple[Schema, ...] = tuple(
    {
        "name": name,
        "in": "header",
        "description": text,
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_MS},
    }
    for name, text in (
        (TTFT_HEADER, "Objective for the time to the first token, in milliseconds."),
        (TPOT_HEADER, "Objective for the mean time between tokens, in milliseconds."),
    )
)

CACHE_SALT: Schema = {
    "name": "cache_salt",
    "in": "query",
    "description": "That of the session.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARACTERS},
}

MODEL: Schema = {
    "name": "model",
    "in": "query",
    "description": "Needed where several models are served.",
    "schema": {"type": "string"},
}
DONE = "Ends with `data: [DONE]`. An error after the first event is an event itself, before that one."


def _in_path(name: str, **schema: Any) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **schema}}


def _tokenizer(path: str, name: str) -> tuple[Operation, Operation]:
    return (
        Operation(
            method="post",
            path=f"{path}/tokenize",
            name=f"{name}Tokenize",
            summary="Token ids of `prompt`, or of `messages` and `tools` through the chat template: one of both.",
            request=TokenizeRequest,
            answer=TokenizeResponse,
            errors=(404,),
        ),
        Operation(
            method="post",
            path=f"{path}/detokenize",
            name=f"{name}Detokenize",
            summary="The text of token ids.",
            request=DetokenizeRequest,
            answer=DetokenizeResponse,
            errors=(404,),
        ),
    )


def _adapters(prefix: str, name: str) -> tuple[Operation, Operation]:
    return (
        Operation(
            method="post",
            path=f"{prefix}/load_lora_adapter",
            name=f"{name}LoadAdapter",
            summary="Load a LoRA adapter on all workers of its model. For administrators.",
            request=LoadAdapterRequest,
            answer=AdapterChange,
            errors=(401, 403, 404),
            administrative=True,
        ),
        Operation(
            method="post",
            path=f"{prefix}/unload_lora_adapter",
            name=f"{name}UnloadAdapter",
            summary="Unload a LoRA adapter from all workers of its model. For administrators.",
            request=UnloadAdapterRequest,
            answer=AdapterChange,
            errors=(401, 403, 404),
            administrative=True,
        ),
    )


GENERATION = (404, 429, 504)
"""No such model; the tenant's limit or a full queue; the deadline."""

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="The answer to a chat.",
        request=ChatRequest,
        answer=ChatResponse,
        events=Events(document=ChatChunk, manner=DONE),
        errors=(*GENERATION, 409),
        parameters=(TIMEOUT, *SLO),
    ),
    Operation(
        method="post",
        path="/v1/completions",
        name="createCompletion",
        summary="Continuations of prompts.",
        request=CompletionRequest,
        answer=CompletionResponse,
        events=Events(document=CompletionResponse, manner=DONE),
        errors=(*GENERATION, 409),
        parameters=(TIMEOUT, *SLO),
    ),
    Operation(
        method="post",
        path="/v1/responses",
        name="createResponse",
        summary="The answer to a chat in the form of the Responses API. Nothing is kept.",
        request=ResponsesRequest,
        answer=ResponseObject,
        events=Events(
            document=ResponseEvent,
            manner="From `response.created` to `response.completed`, `response.incomplete` or `response.failed`.",
        ),
        errors=GENERATION,
        parameters=(TIMEOUT, *SLO),
    ),
    Operation(
        method="post",
        path="/v1/messages",
        name="createMessage",
        summary="The answer to a chat in the form of Anthropic's Messages API. `max_tokens` is required.",
        request=MessagesRequest,
        answer=MessageObject,
        events=Events(document=MessageEvent, manner="From `message_start` to `message_stop`, or `error`."),
        errors=GENERATION,
        parameters=(TIMEOUT, *SLO),
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        name="countMessageTokens",
        summary="How long the prompt of a message is. Bounds of fields that do not shape it are not checked.",
        request=MessagesRequest,
        answer=CountedTokens,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        name="createEmbedding",
        summary="Vectors of prompts.",
        request=EmbeddingRequest,
        answer=EmbeddingResponse,
        errors=GENERATION,
        parameters=(TIMEOUT,),
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        summary="What is served; in Anthropic's form for clients that send `anthropic-version`.",
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{name}",
        name="retrieveModel",
        summary="One model. Its name may have slashes.",
        answer=ModelCard,
        errors=(404,),
        parameters=(_in_path("name"),),
    ),
    Operation(
        method="get",
        path="/v1/requests/{request_id}/explain",
        name="explainRequest",
        summary="Where a recent request ran and why, by our id, the answer's, or the client's own.",
        answer=RequestRecord,
        errors=(404,),
        parameters=(_in_path("request_id"),),
    ),
    Operation(
        method="post",
        path="/v1/sessions",
        name="openSession",
        summary="Have a conversation kept by the worker that begins it.",
        request=OpenRequest,
        answer=OpenedSession,
        errors=(404, 409),
    ),
    Operation(
        method="delete",
        path="/v1/sessions/{session_id}",
        name="deleteSession",
        summary="Forget a conversation.",
        answer=ClosedSession,
        errors=(404,),
        parameters=(_in_path("session_id", minLength=1, maxLength=MAX_SESSION_BYTES), CACHE_SALT),
    ),
    Operation(
        method="post",
        path="/open_session",
        name="openSessionAsSglang",
        summary="As `POST /v1/sessions`, in SGLang's form: the answer is the id.",
        request=OpenRequest,
        answer=str,
        errors=(404, 409),
    ),
    Operation(
        method="post",
        path="/close_session",
        name="closeSessionAsSglang",
        summary="As `DELETE /v1/sessions/{id}`, in SGLang's form.",
        request=CloseRequest,
        answer=None,
        errors=(404,),
    ),
    *_tokenizer("", "plain"),
    *_tokenizer("/v1", "v1"),
    *_adapters("/v1", "v1"),
    *_adapters("", "plain"),
    Operation(method="get", path="/live", name="live", summary="The process answers.", answer=Live),
    Operation(
        method="get",
        path="/ready",
        name="ready",
        summary="Requests can be served.",
        answer=HealthReport,
        unready=True,
    ),
    Operation(
        method="get", path="/health", name="health", summary="The same as `/ready`.", answer=HealthReport, unready=True
    ),
    Operation(
        method="get", path="/ping", name="ping", summary="The same as `/ready`.", answer=HealthReport, unready=True
    ),
    Operation(
        method="post", path="/ping", name="postPing", summary="The same as `/ready`.", answer=HealthReport, unready=True
    ),
    Operation(method="get", path="/load", name="load", summary="Requests that are being answered.", answer=Load),
    Operation(
        method="get",
        path="/tokenizer_info",
        name="tokenizerInfo",
        summary="The tokenizer of a model, and its chat template.",
        answer=TokenizerInfo,
        errors=(404,),
        parameters=(MODEL,),
    ),
    Operation(method="get", path="/version", name="version", summary="Tandem's version.", answer=Version),
    Operation(method="get", path="/openapi.json", name="openapi", summary="This document.", answer=dict[str, Any]),
    Operation(
        method="get",
        path="/metrics",
        name="metrics",
        summary="Metrics for Prometheus, where they have no port of their own. For administrators.",
        answer=str,
        errors=(403,),
        plain_text=True,
        administrative=True,
    ),
)
