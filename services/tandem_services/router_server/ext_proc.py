"""Envoy's external processing service (`envoy.service.ext_proc.v3.ExternalProcessor`) for Inference Gateways.

The protocol and its names are those of proposal 004 of kubernetes-sigs/gateway-api-inference-extension. The module has
the message builders, `Exchange` for one HTTP request, and the gRPC service.

    message in          meaning                                    reply
    request_headers     no body, or one that is not sent           destination in the headers' reply
                        the body follows whole (BUFFERED)          continue; destination in the body's reply
                        the body follows in pieces (FULL_DUPLEX)   none yet
    request_body        the last piece, or the only one            destination, and the body sent back
    request_trailers    what follows the last piece                the same, and continue
    response_headers    which gateway has served                   continue
    response_body       the response in pieces                     the same bytes sent back, or continue
    response_trailers   the end                                    continue

A request that cannot be served gets an immediate response, which ends the exchange (`over`). In observability mode
there are no replies. A message that the protocol does not allow raises `ProtocolError`.

A data plane that does not announce its body mode sends pieces, as the endpoint-picker protocol requires. In the modes
STREAMED, BUFFERED_PARTIAL, GRPC and NONE the body cannot be read before the request continues; the gateway chooses the
workers of such requests.
"""

import logging
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.struct_pb2 import Struct

from tandem_services.common.errors import ApiError
from tandem_services.gateway.http.errors import UNEXPECTED, error_body
from tandem_services.gateway.limits import MAX_BODY_BYTES
from tandem_services.router.tickets import TICKET_HEADER
from tandem_services.router_server.endpoint_picker import Pick, RequestHead
from tandem_services.router_server.routing_service import Places, RouterMetrics

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
"""Max. bytes of a body chunk that is sent back: Envoy accepts chunks of less than 64 KiB."""


def head_of(message: Any) -> RequestHead:
    """From a `ProcessingRequest` with request headers. Raises `ApiError` 400 for a subset that is none."""
    given = message.request_headers.headers.headers
    headers = [(each.key.lower().encode("utf-8"), each.raw_value or each.value.encode("utf-8")) for each in given]
    return RequestHead(headers=headers, subset=_subset(message.metadata_context))


def served_endpoint(message: Any) -> str | None:
    """Endpoint that served a `ProcessingRequest` with response headers; None if the data plane does not report it."""
    value = _metadata(message.metadata_context, LB, SERVED)
    return value.string_value or None if value is not None else None


def destination(pick: Pick) -> tuple[Any, Any]:
    """Header mutation and dynamic metadata that send a request to `pick`; both contain the same."""
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
    """Continue with the request; None: the destination comes with its body."""
    if pick is None:
        return ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse()))
    mutation, metadata = destination(pick)
    common = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=common), dynamic_metadata=metadata
    )


def request_body(pick: Pick | None) -> Any:
    """Continue with a buffered body, or with a chunk of one that Envoy holds itself."""
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


READ_METHOD = "POST"


class ProtocolError(Exception):
    """The data plane sent what the protocol has no place for."""


class Picker(Protocol):
    """See `EndpointPicker`."""

    async def pick(self, head: RequestHead, body: bytes | None) -> Pick: ...


class _Stage(Enum):
    START = auto()
    BODY = auto()
    """The body is needed for the pick."""
    PICKED = auto()
    OVER = auto()


class Exchange:
    """See the module docstring. `memory` counts the bytes of bodies that are kept, for all exchanges of a router."""

    def __init__(self, picker: Picker, memory: Places) -> None:
        self._picker = picker
        self._memory = memory
        self._stage = _Stage.START
        self._observes = False
        self._head = RequestHead(headers=())
        self._body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
        self._response_mode = ProcessingMode.FULL_DUPLEX_STREAMED
        self._body = bytearray()
        self._pick: Pick | None = None

    @property
    def over(self) -> bool:
        """No further reply is due."""
        return self._stage is _Stage.OVER

    async def answer(self, message: Any) -> list[Any]:
        """`ProcessingResponse`s to a `ProcessingRequest`, in order. Raises `ProtocolError`."""
        kind = message.WhichOneof("request")
        try:
            answers = await self._answer(kind, message)
        except ApiError as error:
            self._end()
            self._stage = _Stage.OVER
            answers = [immediate(error, self._head)]
        return [] if self._observes else answers

    def close(self) -> None:
        """The stream has ended, however it ended. May be called at any time."""
        self._forget_body()
        self._end()

    async def _answer(self, kind: str | None, message: Any) -> list[Any]:
        if (kind == "request_headers") != (self._stage is _Stage.START):
            raise ProtocolError(f"{kind or 'an empty message'} is not expected now")
        match kind:
            case "request_headers":
                return await self._request_headers(message)
            case "request_body":
                return await self._request_body(message.request_body)
            case "request_trailers":
                return await self._request_trailers()
            case "response_headers":
                return self._response_headers(message)
            case "response_body":
                return self._response_body(message.response_body)
            case "response_trailers":
                self._end()
                return [response_trailers()]
        raise ProtocolError("the message is empty")

    async def _request_headers(self, message: Any) -> list[Any]:
        self._observes = message.observability_mode
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._stage = _Stage.PICKED
        self._head = head_of(message)
        if message.request_headers.end_of_stream or not self._body_is_needed():
            return [request_headers(await self._choose(None))]
        self._stage = _Stage.BODY
        return [] if self._duplex else [request_headers(None)]

    def _body_is_needed(self) -> bool:
        readable = self._body_mode in (ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED)
        return readable and self._head.first(":method").upper() == READ_METHOD

    async def _request_body(self, chunk: Any) -> list[Any]:
        if self._stage is not _Stage.BODY:
            if self._duplex:
                return [*streamed_request_body(chunk.body, end=chunk.end_of_stream)]
            return [request_body(None)]
        self._keep(chunk.body)
        if not self._duplex:
            # All of it, whether it ends here or with trailers.
            return [request_body(await self._choose(self._taken_body()))]
        return await self._sent_on(end=True) if chunk.end_of_stream else []

    async def _request_trailers(self) -> list[Any]:
        sent_on = await self._sent_on(end=False) if self._stage is _Stage.BODY else []
        return [*sent_on, request_trailers()]

    async def _sent_on(self, *, end: bool) -> list[Any]:
        body = self._taken_body()
        pick = await self._choose(body)
        return [request_headers(pick), *streamed_request_body(body, end=end)]

    def _response_headers(self, message: Any) -> list[Any]:
        served = served_endpoint(message)
        if self._pick is not None and served is not None:
            self._pick.served_by(served)
        if message.response_headers.end_of_stream:
            self._end()
        return [response_headers()]

    def _response_body(self, chunk: Any) -> list[Any]:
        if chunk.end_of_stream:
            self._end()
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return [*streamed_response_body(chunk.body, end=chunk.end_of_stream)]
        return [response_body()]

    async def _choose(self, body: bytes | None) -> Pick:
        self._stage = _Stage.PICKED
        self._pick = await self._picker.pick(self._head, body)
        return self._pick

    @property
    def _duplex(self) -> bool:
        return bool(self._body_mode == ProcessingMode.FULL_DUPLEX_STREAMED)

    def _keep(self, chunk: bytes) -> None:
        if len(self._body) + len(chunk) > MAX_BODY_BYTES:
            raise ApiError(413, f"request body is limited to {MAX_BODY_BYTES} bytes", kind="RequestEntityTooLargeError")
        self._memory.take(len(chunk))
        self._body += chunk

    def _taken_body(self) -> bytes:
        body = bytes(self._body)
        self._forget_body()
        return body

    def _forget_body(self) -> None:
        self._memory.give(len(self._body))
        self._body.clear()

    def _end(self) -> None:
        if self._pick is not None:
            self._pick.end()


logger = logging.getLogger(__name__)
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

NOTHING = RequestHead(headers=())
"""Head of a request that is passed through."""

MAX_BODIES_BYTES = 256 << 20
"""Max. bytes of all bodies that are still arriving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalProcessor:
    """Follows one exchange per stream."""

    picker: Picker
    places: Places
    memory: Places
    metrics: RouterMetrics

    def handler(self) -> Any:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self._process,
                    request_deserializer=ext_proc.ProcessingRequest.FromString,
                    response_serializer=ext_proc.ProcessingResponse.SerializeToString,
                )
            },
        )

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            with self.places.one():
                self.metrics.exchanges.set(self.places.taken)
                async for answer in self._answers(requests, context):
                    yield answer
        except ApiError as error:
            yield immediate(error, NOTHING)
        finally:
            self.metrics.exchanges.set(self.places.taken)

    async def _answers(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(self.picker, self.memory)
        try:
            async for message in requests:
                for answer in await exchange.answer(message):
                    yield answer
                if exchange.over:
                    return
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            # The boundary of one request: its client gets a generic error, others continue.
            logger.exception("stream failed unexpectedly")
            yield immediate(UNEXPECTED, NOTHING)
        finally:
            exchange.close()
