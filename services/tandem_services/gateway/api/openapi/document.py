"""The OpenAPI document of a gateway, `GET /openapi.json`: built once, from the structs that it decodes and encodes.

The document describes this gateway: with or without API keys, /metrics and strict checks of unknown fields. The console
shows it as a page at /docs (`console/static/api_reference.js`); FastAPI's page loads scripts from other hosts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_services.common.metrics import CONTENT_TYPE
from tandem_services.gateway.api.openapi.components import Components
from tandem_services.gateway.api.openapi.operations import OPERATIONS, Operation
from tandem_services.gateway.http.authentication import PROBES
from tandem_services.gateway.http.errors import ErrorResponse, MessageError, speaks_anthropic
from tandem_services.gateway.http.monitoring_routes import VERSION
from tandem_services.gateway.http.sse import encode_json

ERRORS: Mapping[int, tuple[str, str]] = {
    400: ("BadRequest", "What can never succeed. `param` names the field at fault."),
    401: ("Unauthorized", "No API key or token for commands, or an unknown one."),
    403: ("Forbidden", "This key may not use administrators' routes."),
    404: ("NotFound", "No such model, session or request."),
    408: ("RequestTimeout", "Headers or body did not arrive in time."),
    409: ("Conflict", "The session is open already, is not kept, or cannot take this turn."),
    413: ("RequestEntityTooLarge", "The body is too large."),
    414: ("UriTooLong", "The URL is too long."),
    415: ("UnsupportedMediaType", "The body must be application/json, as it is."),
    429: ("TooManyRequests", "A limit of the API key, or its requests fill the queue."),
    431: ("RequestHeaderFieldsTooLarge", "Headers are too many or too large."),
    500: ("InternalServerError", "Gateway or workers failed while answering."),
    503: ("ServiceUnavailable", "No worker or connection is free. The same request may succeed later."),
    504: ("GatewayTimeout", "The request's deadline has passed."),
    505: ("HttpVersionNotSupported", "Only HTTP/1.0 and HTTP/1.1 are spoken here."),
}
"""Name of the component and description, by status."""

ALWAYS = (400, 408, 414, 431, 500, 503, 505)
"""What any request may meet."""

WITH_A_BODY = (413, 415)

WAITS = (429, 503)
"""Statuses that may say when to try again."""


Schema = dict[str, Any]
PATH = "/openapi.json"
KEY, ANTHROPIC_KEY = "apiKey", "anthropicApiKey"

ANTHROPIC = "Anthropic"
"""Prefix of the errors of Anthropic's routes."""

ABOUT = (
    "OpenAI-compatible API of a Tandem gateway. Null means absent. Of equal keys of an object the last one counts. "
    "Paths that answer GET answer HEAD as well. Every answer has an `X-Request-Id`, the client's own where it sent one "
    "of 1 to 128 printable ASCII characters."
)

UNKNOWN_FIELDS = {
    False: "Fields that a request's schema does not name are ignored.",
    True: "Fields that a request's schema does not name are refused with 400.",
}

REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The client's own name for the request.",
    "schema": {"type": "string"},
}
REQUEST_ID_HEADER: Schema = {"X-Request-Id": {"description": "Of this request.", "schema": {"type": "string"}}}
RETRY_AFTER: Schema = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What differs between gateways."""

    strict_fields: bool
    keys: bool
    metrics: bool
    """With the routes of administrators."""


def document_route(traits: Traits) -> Route:
    """`GET /openapi.json`. The document is built at the first request."""
    made: list[bytes] = []

    async def document(_: Request) -> Response:
        if not made:
            made.append(encode_json(openapi_document(traits)))
        return Response(made[0], media_type="application/json")

    return Route(PATH, document, methods=["GET", "HEAD"])


def openapi_document(traits: Traits) -> Schema:
    operations = [each for each in OPERATIONS if traits.metrics or not each.administrative]
    components = Components(
        [each.request for each in operations if each.request is not None],
        _answers(operations),
        strict=traits.strict_fields,
    )
    paths: Schema = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, components, traits)
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": VERSION,
            "description": f"{ABOUT} {UNKNOWN_FIELDS[traits.strict_fields]}",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.schemas.items())),
            "responses": dict(_errors(components)),
        },
    }
    if traits.keys:
        document["components"]["securitySchemes"] = {
            KEY: {"type": "http", "scheme": "bearer"},
            ANTHROPIC_KEY: {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{KEY: []}, {ANTHROPIC_KEY: []}]
    return document


def _answers(operations: list[Operation]) -> Iterator[Any]:
    yield ErrorResponse
    yield MessageError
    for operation in operations:
        if operation.answer is not None:
            yield operation.answer
        if operation.events is not None:
            yield operation.events.document


def _described(operation: Operation, components: Components, traits: Traits) -> Schema:
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*operation.parameters, REQUEST_ID],
        "responses": {
            "200": _success(operation, components),
            **{str(status): _refusal(status, operation) for status in _statuses(operation, traits)},
        },
    }
    if operation.unready:
        described["responses"]["503"] = _unready(operation, components)
    if operation.request is not None:
        body = {"application/json": {"schema": components.request(operation.request)}}
        described["requestBody"] = {"required": True, "content": body}
    if traits.keys and operation.path in PROBES:
        described["security"] = []
    return described


def _statuses(operation: Operation, traits: Traits) -> list[int]:
    statuses = {*ALWAYS, *operation.errors}
    if operation.request is not None:
        statuses |= {*WITH_A_BODY}
    if traits.keys and operation.path not in PROBES:
        statuses |= {401, 429} if operation.method == "post" else {401}
    if not traits.keys:
        statuses -= {403}
    return sorted(statuses)


def _success(operation: Operation, components: Components) -> Schema:
    content: Schema = {}
    if operation.plain_text:
        content[CONTENT_TYPE] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        content["application/json"] = {"schema": components.answer(operation.answer)}
    description = "The answer."
    if operation.events is not None:
        # OpenAPI 3.1 has no word for the documents of a stream; `itemSchema` of 3.2 is known to few programs yet.
        content["text/event-stream"] = {"x-event-schema": components.answer(operation.events.document)}
        description = f"The answer; with `stream: true`, events with JSON documents. {operation.events.manner}"
    success: Schema = {"description": description, "headers": REQUEST_ID_HEADER}
    return {**success, "content": content} if content else success


def _refusal(status: int, operation: Operation) -> Schema:
    prefix = ANTHROPIC if speaks_anthropic(operation.path) else ""
    return {"$ref": f"#/components/responses/{prefix}{ERRORS[status][0]}"}


def _errors(components: Components) -> Iterator[tuple[str, Schema]]:
    """What is refused before there is a path, as a request without a Host, is so in OpenAI's shape everywhere."""
    openai = components.answer(ErrorResponse)
    either = {"anyOf": [components.answer(MessageError), openai]}
    for status, (name, description) in ERRORS.items():
        headers = {**REQUEST_ID_HEADER, **RETRY_AFTER} if status in WAITS else REQUEST_ID_HEADER
        for prefix, schema in (("", openai), (ANTHROPIC, either)):
            content = {"application/json": {"schema": schema}}
            yield prefix + name, {"description": description, "headers": headers, "content": content}


def _unready(operation: Operation, components: Components) -> Schema:
    options = [components.answer(operation.answer), components.answer(ErrorResponse)]
    return {
        "description": "Not ready, with the reasons; or no connection is free.",
        "headers": REQUEST_ID_HEADER,
        "content": {"application/json": {"schema": {"anyOf": options}}},
    }
