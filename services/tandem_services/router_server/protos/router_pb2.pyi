from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class ChooseRequest(_message.Message):
    __slots__ = ("model", "token_ids", "text", "messages", "max_tokens", "request_id", "session", "cache_salt", "priority", "exclude", "for_gateway", "return_token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    FOR_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: TokenIds
    text: str
    messages: Messages
    max_tokens: int
    request_id: str
    session: str
    cache_salt: str
    priority: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    for_gateway: bool
    return_token_ids: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., max_tokens: _Optional[int] = ..., request_id: _Optional[str] = ..., session: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ..., for_gateway: _Optional[bool] = ..., return_token_ids: _Optional[bool] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "request_endpoint", "peer_endpoint", "compat_hash", "context_length", "page_size", "model")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PEER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COMPAT_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    request_endpoint: str
    peer_endpoint: str
    compat_hash: str
    context_length: int
    page_size: int
    model: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., request_endpoint: _Optional[str] = ..., peer_endpoint: _Optional[str] = ..., compat_hash: _Optional[str] = ..., context_length: _Optional[int] = ..., page_size: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("source", "tokens", "seconds", "within_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    source: Worker
    tokens: int
    seconds: float
    within_s: float
    def __init__(self, source: _Optional[_Union[Worker, _Mapping]] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., within_s: _Optional[float] = ...) -> None: ...

class Term(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ChooseResponse(_message.Message):
    __slots__ = ("reservation", "expires_in_s", "placement", "source", "decode", "prefill", "fetch", "prompt_tokens", "matched_tokens", "predicted_s", "terms", "has_room", "for_gateway", "token_ids")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    HAS_ROOM_FIELD_NUMBER: _ClassVar[int]
    FOR_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    reservation: str
    expires_in_s: float
    placement: str
    source: str
    decode: Worker
    prefill: Worker
    fetch: Fetch
    prompt_tokens: int
    matched_tokens: int
    predicted_s: float
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    has_room: bool
    for_gateway: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation: _Optional[str] = ..., expires_in_s: _Optional[float] = ..., placement: _Optional[str] = ..., source: _Optional[str] = ..., decode: _Optional[_Union[Worker, _Mapping]] = ..., prefill: _Optional[_Union[Worker, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., predicted_s: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ..., has_room: _Optional[bool] = ..., for_gateway: _Optional[bool] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: str
    def __init__(self, reservation: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "model", "interface", "state", "age_s", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    interface: str
    state: str
    age_s: float
    choice: ChooseResponse
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., interface: _Optional[str] = ..., state: _Optional[str] = ..., age_s: _Optional[float] = ..., choice: _Optional[_Union[ChooseResponse, _Mapping]] = ...) -> None: ...
