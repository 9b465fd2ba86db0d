"""Messages of Envoy's external processing as a data plane sends them, and readers of what it gets."""

from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
BUFFERED = ProcessingMode.BUFFERED
STREAMED = ProcessingMode.STREAMED
NONE = ProcessingMode.NONE


def head(
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    mode: int | None = DUPLEX,
    response_mode: int | None = None,
    end: bool = False,
    subset: Any = None,
    **headers: str,
) -> Any:
    """The first message. `mode` None: the data plane does not say how it sends bodies."""
    given = {":method": method, ":path": path, ":authority": "pool", **headers}
    message = ext_proc.ProcessingRequest()
    for name, value in given.items():
        message.request_headers.headers.headers.append(
            HeaderValue(key=name.replace("_", "-"), raw_value=value.encode("utf-8"))
        )
    message.request_headers.end_of_stream = end
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = mode if response_mode is None else response_mode
    if subset is not None:
        metadata = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        metadata.update({"x-gateway-destination-endpoint-subset": subset})
    return message


def body(data: bytes, *, end: bool = True) -> Any:
    return ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=data, end_of_stream=end))


def trailers() -> Any:
    return ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())


def answer_head(*, served: str | None = None, end: bool = False) -> Any:
    message = ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders(end_of_stream=end))
    if served is not None:
        message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
    return message


def answer_body(data: bytes, *, end: bool = True) -> Any:
    return ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=data, end_of_stream=end))


def answer_trailers() -> Any:
    return ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers())


def kinds(answers: list[Any]) -> list[str]:
    return [answer.WhichOneof("response") for answer in answers]


def set_headers(answer: Any) -> dict[str, str]:
    """Headers that an answer to request headers or body sets."""
    mutation = getattr(answer, answer.WhichOneof("response")).response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def streamed(answers: list[Any], kind: str = "request_body") -> tuple[bytes, bool]:
    """All of a body that is on its way again, and whether it ends there."""
    chunks = [
        answer.request_body.response.body_mutation.streamed_response
        if kind == "request_body"
        else answer.response_body.response.body_mutation.streamed_response
        for answer in answers
        if answer.WhichOneof("response") == kind
    ]
    assert not any(chunk.end_of_stream for chunk in chunks[:-1])
    return b"".join(chunk.body for chunk in chunks), chunks[-1].end_of_stream
