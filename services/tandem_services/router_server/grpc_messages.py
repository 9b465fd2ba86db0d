"""Between protobuf (`protos/router.proto`) and the structs of `schemas`, field by field."""

import math
from typing import Any

import grpc
import msgspec

from tandem_services.common.errors import ApiError, bad_request
from tandem_services.gateway.openai_schemas import ChatMessage
from tandem_services.router.choice import PlannedFetch, WorkerView
from tandem_services.router_server.protos import router_pb2 as pb
from tandem_services.router_server.schemas import DEFAULT_MAX_TOKENS, ChoiceRecord, ChooseAsk, ChosenRoute

CODES: dict[int, Any] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC's names for the statuses of `ApiError`; any other is INTERNAL."""


def ask_of(request: pb.ChooseRequest) -> ChooseAsk:
    """Raises `ApiError` 400 for messages that are none."""
    kind = request.WhichOneof("prompt")
    return ChooseAsk(
        model=request.model,
        token_ids=[*request.token_ids.ids] if kind == "token_ids" else None,
        prompt=request.text if kind == "text" else None,
        messages=_messages(request.messages) if kind == "messages" else None,
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        request_id=request.request_id,
        session=request.session,
        cache_salt=request.cache_salt,
        priority=request.priority,
        exclude=[*request.exclude],
        for_gateway=request.for_gateway,
        return_token_ids=request.return_token_ids,
    )


def chosen(route: ChosenRoute) -> pb.ChooseResponse:
    return pb.ChooseResponse(
        reservation=route.reservation,
        expires_in_s=route.expires_in_s,
        placement=route.placement,
        source=route.source,
        decode=worker(route.decode),
        prefill=None if route.prefill is None else worker(route.prefill),
        fetch=None if route.fetch is None else _fetch(route.fetch),
        prompt_tokens=route.prompt_tokens,
        matched_tokens=route.matched_tokens,
        predicted_s=route.predicted_s,
        terms=[pb.Term(name=term.name, seconds=term.seconds) for term in route.terms],
        has_room=route.has_room,
        for_gateway=route.for_gateway,
        token_ids=route.token_ids or (),
    )


def worker(view: WorkerView) -> pb.Worker:
    return pb.Worker(
        worker_id=view.worker_id,
        incarnation=view.incarnation,
        role=view.role.value,
        request_endpoint=view.request_endpoint,
        peer_endpoint=view.peer_endpoint,
        compat_hash=view.compat_hash,
        context_length=view.context_length,
        page_size=view.page_size,
        model=view.model,
    )


def explained(record: ChoiceRecord) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        request_id=record.request_id,
        model=record.model,
        interface=record.interface,
        state=record.state,
        age_s=record.age_s,
        choice=chosen(record.choice),
    )


def status_of(error: ApiError) -> tuple[Any, str, tuple[tuple[str, str], ...]]:
    """Code, sentence and trailing metadata: `retry-after` in seconds, as in HTTP."""
    after = () if error.retry_after is None else (("retry-after", str(max(1, math.ceil(error.retry_after)))),)
    return CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error), after


def _fetch(fetch: PlannedFetch) -> pb.Fetch:
    return pb.Fetch(source=worker(fetch.source), tokens=fetch.tokens, seconds=fetch.seconds, within_s=fetch.within_s)


def _messages(given: pb.Messages) -> list[ChatMessage]:
    fields = [{"role": message.role, "content": message.content} for message in given.messages]
    try:
        return msgspec.convert(fields, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise bad_request(f"messages: {error}", "messages") from error
