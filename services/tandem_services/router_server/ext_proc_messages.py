"""Messages of Envoy's external processing (`envoy.service.ext_proc.v3`) as the endpoint-picker protocol uses them.

The protocol is proposal 004 of kubernetes-sigs/gateway-api-inference-extension; names of headers and metadata are its.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.struct_pb2 import Struct

from tandem_services.common.errors import ApiError
from tandem_services.gateway.error_responses import error_body
from tandem_services.gateway.route_ticket import TICKET_HEADER
from tandem_services.router_server.picking import Pick, RequestHead

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key in the metadata of `LB`: the endpoints to use, in order."""
LB = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
"""Key in the metadata of `LB` with the response: the endpoint that was used in fact."""
SUBSET_HINT = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key in the metadata of `SUBSET_HINT`: the endpoints that may be chosen."""

MAX_SUBSET = 4096
CHUNK_BYTES = 62_000
"""Of a body on its way back: Envoy takes chunks of less than 64 KiB."""


def head_of(message: Any) -> RequestHead:
    """From a `ProcessingRequest` with request headers. Raises `ApiError` 400 for a subset that is none."""
    given = message.request_headers.headers.headers
    headers = [(each.key.lower().encode("utf-8"), each.raw_value or each.value.encode("utf-8")) for each in given]
    return RequestHead(headers=headers, subset=_subset(message.metadata_context))


def served_endpoint(message: Any) -> str | None:
    """Of a `ProcessingRequest` with response headers; None where the data plane does not say."""
    value = _metadata(message.metadata_context, LB, SERVED)
    return value.string_value or None if value is not None else None


def destination(pick: Pick) -> tuple[Any, Any]:
    """Header mutation and dynamic metadata that send a request where `pick` says; both say the same."""
    endpoints = ",".join(pick.endpoints)
    headers = [(DESTINATION, endpoints)]
    if pick.reservation is not None:
        headers.append((TICKET_HEADER, pick.reservation))
    mutation = ext_proc.HeaderMutation(
        set_headers=_options(headers),
        # A client's own would be taken for ours.
        remove_headers=[] if pick.reservation is not None else [TICKET_HEADER],
    )
    metadata = Struct()
    metadata.update({LB: {DESTINATION: endpoints}})
    return mutation, metadata


def request_headers(pick: Pick | None) -> Any:
    """Go on with the request; None: where to will be said with its body."""
    if pick is None:
        return ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse()))
    mutation, metadata = destination(pick)
    common = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=common), dynamic_metadata=metadata
    )


def request_body(pick: Pick | None) -> Any:
    """Go on with a buffered body, or with a chunk of one that Envoy holds itself."""
    if pick is None:
        return ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=ext_proc.CommonResponse()))
    mutation, metadata = destination(pick)
    common = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=common), dynamic_metadata=metadata)


def streamed_request_body(body: bytes, *, end: bool) -> Iterator[Any]:
    """All of a body that was sent here, on its way again, in chunks."""
    for common in _streamed(body, end=end):
        yield ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=common))


def request_trailers() -> Any:
    return ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


def response_headers() -> Any:
    return ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse()))


def response_body() -> Any:
    return ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse(response=ext_proc.CommonResponse()))


def streamed_response_body(body: bytes, *, end: bool) -> Iterator[Any]:
    for common in _streamed(body, end=end):
        yield ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse(response=common))


def response_trailers() -> Any:
    return ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())


def immediate(error: ApiError, head: RequestHead) -> Any:
    """An answer in place of any gateway's, in the shape that clients of the path expect."""
    headers = [("content-type", "application/json")]
    if error.status == 401:
        headers.append(("www-authenticate", "Bearer"))
    if error.retry_after is not None:
        headers.append(("retry-after", str(max(1, math.ceil(error.retry_after)))))
    response = ext_proc.ImmediateResponse(
        headers=ext_proc.HeaderMutation(set_headers=_options(headers)),
        body=error_body(error, path=head.path, request_id=head.first("x-request-id")),
        details=f"tandem_router_{error.kind}",
    )
    # Envoy's enum has names for most statuses, and takes their numbers.
    response.status.code = error.status
    return ext_proc.ProcessingResponse(immediate_response=response)


def _streamed(body: bytes, *, end: bool) -> Iterator[Any]:
    starts = range(0, len(body), CHUNK_BYTES) or range(1)
    for start in starts:
        chunk = ext_proc.StreamedBodyResponse(
            body=body[start : start + CHUNK_BYTES], end_of_stream=end and start == starts[-1]
        )
        yield ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=chunk))


def _options(headers: Iterable[tuple[str, str]]) -> list[Any]:
    overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode("utf-8")), append_action=overwrite)
        for name, value in headers
    ]


def _subset(context: Any) -> tuple[str, ...] | None:
    value = _metadata(context, SUBSET_HINT, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "string_value":
        given = [each.strip() for each in value.string_value.split(",")]
    else:
        given = [each.string_value for each in value.list_value.values]
    return tuple(each for each in given[:MAX_SUBSET] if each)


def _metadata(context: Any, namespace: str, key: str) -> Any:
    """None when it is not there. Looking up a protobuf map by index would add what is missing."""
    if namespace not in context.filter_metadata:
        return None
    fields = context.filter_metadata[namespace].fields
    return fields.get(key)
