"""How an answer is written: what chat and completions have in common is `AnswerFormat`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.outputs import TokenLogprob
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.gateway.api.openai_schemas import CompletionTokensDetails, PromptTokensDetails, Usage
from tandem_services.gateway.dispatch.plan import Choice
from tandem_services.gateway.dispatch.sessions import SessionManager
from tandem_services.gateway.http.sse import TextEvents
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.models.prompts import PromptEncoder
from tandem_services.gateway.output.choice_text import ChoiceFinish, ChoicePiece, ScoredToken
from tandem_services.gateway.output.parts import Part


@dataclass(kw_only=True, slots=True)
class WholeChoice:
    """All pieces of one choice, put together."""

    index: int
    texts: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: ChoiceFinish | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def add(self, piece: ChoicePiece) -> None:
        self.texts.append(piece.text)
        self.parts += piece.parts
        self.scored += piece.scored
        self.token_ids += piece.token_ids
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.finish = piece.finish

    @property
    def text(self) -> str:
        return "".join(self.texts)


def share_prompt_logprobs(choices: Sequence[WholeChoice], n: int) -> None:
    """The first of every `n` choices, those of one prompt, has requested its logprobs for the others."""
    for choice in choices:
        choice.prompt_logprobs = choices[choice.index - choice.index % n].prompt_logprobs


class AnswerFormat(Protocol):
    """JSON of one answer, and the events of a streamed one; made for one request."""

    def opening(self, choice: Choice, first: ChoicePiece, usage: Usage | None) -> bytes:
        """The events before the first piece of a choice, if there are any. They are written before those of `first`."""
        ...

    @property
    def text_events(self) -> TextEvents | None:
        """Makes the events of pieces that are nothing but text, and not a choice's first or last; None where they are
        made of `chunk` alone."""
        ...

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        """The events of one piece of one choice; `usage` when the client requested it in every chunk."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The events that end a stream after the last piece of every choice."""
        ...

    def failure(self, refusal: ApiError) -> bytes:
        """The events that end a stream that cannot continue."""
        ...

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


def make_usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )


def stop_reason(finish: ChoiceFinish | None) -> int | str | msgspec.UnsetType | None:
    """vLLM's extension: what ended the choice; absent until it has ended."""
    return msgspec.UNSET if finish is None else finish.stop


class ReadModel(Protocol):
    """See `ModelService`."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def prompts(self) -> PromptEncoder: ...

    @property
    def session_manager(self) -> SessionManager: ...


@contextmanager
def renamed_fields(name: Callable[[str | None], str | None]) -> Iterator[None]:
    """`ApiError`s and `InvalidRequestError`s of the block name fields as `name` does, and are all `ApiError`s."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error, name(error.param)) from error
    except InvalidRequestError as error:
        raise _renamed(bad_request(str(error), error.param), name(error.param)) from error


def _renamed(error: ApiError, param: str | None) -> ApiError:
    if param is None or param == error.param:
        return error
    message = str(error).replace(str(error.param), param)
    return ApiError(error.status, message, kind=error.kind, param=param, reason=error.reason)
