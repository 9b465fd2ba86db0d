"""One HTTP request's life with an Inference Gateway: the endpoint picker's side of Envoy's external processing.

    message in          what it means                              answers
    request_headers     head alone, or a body that is not sent     destination in the headers' answer
                        a body follows in one piece (BUFFERED)     go on; the destination comes with the body's answer
                        a body follows as it comes (FULL_DUPLEX)   none yet
    request_body        the last piece, or the only one            destination, and the body on its way again
    request_trailers    what follows the last piece                the same, and go on
    response_headers    who has served                             go on
    response_body       the answer on its way                      the same bytes again, or go on
    response_trailers   the end                                    go on

Anything that cannot be served is answered at once and ends the exchange (`over`). In observability mode nothing is
answered. A message that the protocol has no place for raises `ProtocolError`.

Where the data plane does not say how it sends bodies it sends them as they come: the endpoint-picker protocol asks for
that. In the modes STREAMED, BUFFERED_PARTIAL, GRPC and NONE there is no body to read before the request has to go on:
its workers are chosen by the gateway.
"""

from enum import Enum, auto
from typing import Any, Protocol

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode

from tandem_services.common.errors import ApiError
from tandem_services.gateway.limits import MAX_BODY_BYTES
from tandem_services.router_server import ext_proc_messages as messages
from tandem_services.router_server.picking import Pick, RequestHead
from tandem_services.router_server.places import Places

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
        """Nothing more is to be said."""
        return self._stage is _Stage.OVER

    async def answer(self, message: Any) -> list[Any]:
        """`ProcessingResponse`s to a `ProcessingRequest`, in order. Raises `ProtocolError`."""
        kind = message.WhichOneof("request")
        try:
            answers = await self._answer(kind, message)
        except ApiError as error:
            self._end()
            self._stage = _Stage.OVER
            answers = [messages.immediate(error, self._head)]
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
                return [messages.response_trailers()]
        raise ProtocolError("the message is empty")

    async def _request_headers(self, message: Any) -> list[Any]:
        self._observes = message.observability_mode
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._stage = _Stage.PICKED
        self._head = messages.head_of(message)
        if message.request_headers.end_of_stream or not self._body_is_needed():
            return [messages.request_headers(await self._choose(None))]
        self._stage = _Stage.BODY
        return [] if self._duplex else [messages.request_headers(None)]

    def _body_is_needed(self) -> bool:
        readable = self._body_mode in (ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED)
        return readable and self._head.first(":method").upper() == READ_METHOD

    async def _request_body(self, chunk: Any) -> list[Any]:
        if self._stage is not _Stage.BODY:
            if self._duplex:
                return [*messages.streamed_request_body(chunk.body, end=chunk.end_of_stream)]
            return [messages.request_body(None)]
        self._keep(chunk.body)
        if not self._duplex:
            # All of it, whether its end is told here or with trailers.
            return [messages.request_body(await self._choose(self._taken_body()))]
        return await self._sent_on(end=True) if chunk.end_of_stream else []

    async def _request_trailers(self) -> list[Any]:
        sent_on = await self._sent_on(end=False) if self._stage is _Stage.BODY else []
        return [*sent_on, messages.request_trailers()]

    async def _sent_on(self, *, end: bool) -> list[Any]:
        body = self._taken_body()
        pick = await self._choose(body)
        return [messages.request_headers(pick), *messages.streamed_request_body(body, end=end)]

    def _response_headers(self, message: Any) -> list[Any]:
        served = messages.served_endpoint(message)
        if self._pick is not None and served is not None:
            self._pick.served_by(served)
        if message.response_headers.end_of_stream:
            self._end()
        return [messages.response_headers()]

    def _response_body(self, chunk: Any) -> list[Any]:
        if chunk.end_of_stream:
            self._end()
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return [*messages.streamed_response_body(chunk.body, end=chunk.end_of_stream)]
        return [messages.response_body()]

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
