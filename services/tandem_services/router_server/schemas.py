"""JSON bodies of the router's HTTP API; `grpc_server` has the same in protobuf."""

from typing import Annotated

import msgspec

from tandem_engine.base.logs import quoted
from tandem_services.common.errors import bad_request
from tandem_services.gateway.api.openai_schemas import ChatMessage
from tandem_services.gateway.limits import (
    MAX_OUTPUT_TOKENS,
    MAX_REQUEST_ID_CHARACTERS,
    MAX_USER_CHARACTERS,
    check_cache_salt,
    check_priority,
)
from tandem_services.router.decision import PlannedFetch, ScoreTerm, WorkerView

MAX_TOKEN_IDS = 1 << 21
"""Max. tokens of one prompt, more than any context."""

MAX_EXCLUDED = 256
MAX_NAME_CHARACTERS = 512
DEFAULT_MAX_TOKENS = 256
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ChooseAsk(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/choose`. The prompt is one of `token_ids`, `prompt` and `messages`."""

    model: str
    token_ids: list[TokenId] | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Output tokens it may have."""
    request_id: str = ""
    """The front end's own name for it, for explain."""
    session: str = ""
    """What the policy `session` hashes."""
    cache_salt: str = ""
    priority: int = 0
    """Below 0: rather refused than made to wait for room."""
    exclude: list[str] = []
    """Incarnations that it has failed on."""
    for_gateway: bool = False
    """A Tandem gateway may carry the choice out."""
    return_token_ids: bool = False

    def check(self) -> None:
        """Raises `ApiError` 400 naming the field at fault."""
        if not 1 <= len(self.model) <= MAX_NAME_CHARACTERS:
            raise bad_request(f"model must have 1 to {MAX_NAME_CHARACTERS} characters", "model")
        if sum(prompt is not None for prompt in (self.token_ids, self.prompt, self.messages)) != 1:
            raise bad_request("give exactly one of token_ids, prompt and messages", "token_ids")
        if self.token_ids is not None and not 1 <= len(self.token_ids) <= MAX_TOKEN_IDS:
            raise bad_request(f"token_ids must have 1 to {MAX_TOKEN_IDS} ids, got {len(self.token_ids)}", "token_ids")
        if not 1 <= self.max_tokens <= MAX_OUTPUT_TOKENS:
            raise bad_request(
                f"max_tokens must be between 1 and {MAX_OUTPUT_TOKENS}, got {quoted(self.max_tokens)}", "max_tokens"
            )
        for name, text, most in (
            ("request_id", self.request_id, MAX_REQUEST_ID_CHARACTERS),
            ("session", self.session, MAX_USER_CHARACTERS),
        ):
            if len(text) > most:
                raise bad_request(f"{name} must have at most {most} characters, got {len(text)}", name)
        if len(self.exclude) > MAX_EXCLUDED or any(len(name) > MAX_NAME_CHARACTERS for name in self.exclude):
            raise bad_request(f"exclude takes at most {MAX_EXCLUDED} incarnations", "exclude")
        check_cache_salt(self.cache_salt or None)
        check_priority(self.priority)


class ReleaseAsk(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/release`."""

    reservation: str


class ReleaseAnswer(msgspec.Struct, kw_only=True):
    released: bool
    """False: it had been released, or had expired."""


class ChosenRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request goes."""

    reservation: str
    """For `release`; 32 hex digits."""
    expires_in_s: float
    """The router forgets it by itself after this long."""
    placement: str
    """Which worker computes the prompt: pair, alone, local or degraded (docs/routing.md)."""
    source: str
    """redis, or local without it."""
    decode: WorkerView
    prefill: WorkerView | None
    """None: the decode worker computes the prompt."""
    fetch: PlannedFetch | None
    """A prefix that the computing worker had better bring from another one."""
    prompt_tokens: int
    matched_tokens: int
    """Predicted to be cached on the worker that computes the prompt."""
    predicted_s: float
    """Sum of the terms, which the router minimizes."""
    terms: tuple[ScoreTerm, ...]
    has_room: bool
    """False: it would have to wait at its workers."""
    for_gateway: bool = False
    """A gateway that gets the reservation as `x-tandem-reservation` within two seconds carries the choice out."""
    token_ids: tuple[int, ...] | None = None


class WorkerList(msgspec.Struct, kw_only=True):
    """Answer of `GET /v1/workers`."""

    workers: tuple[WorkerView, ...]


class ChoiceRecord(msgspec.Struct, kw_only=True):
    """One recent choice, for explain. No text, no tokens."""

    request_id: str
    model: str
    interface: str
    """Interface of the request: http, grpc or ext_proc."""
    state: str = "open"
    """open, released or expired."""
    age_s: float = 0.0
    choice: ChosenRoute


class ChoiceList(msgspec.Struct, kw_only=True):
    """Answer of `GET /v1/choices`: the newest first."""

    choices: list[ChoiceRecord]
