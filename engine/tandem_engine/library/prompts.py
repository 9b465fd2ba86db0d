"""Prompts of library callers, in one form: text, token ids, or a conversation; one, or a list of them. And sessions.

    with llm.open_session() as session:
        llm.generate("Once upon a time", params, session=session)
        llm.generate(" And then", params, session=session)      # only what is new

A prompt with a `Session` is the new turn alone, and text gets no special tokens around it. A session is
    1. opened     nothing is kept yet
    2. continued  each prompt given with it is appended to all prompts and outputs before
    3. lost       the engine forgot it (`session_ttl`, `max_sessions`): the next prompt raises `SessionLostError`
    4. closed     the engine releases its tokens and pages

A turn that is aborted or fails adds nothing: the next one continues where it began.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """Give it to `generate`, one prompt at a time. Open one with `open_session`."""

    id: str
    turns: int = field(default=0, init=False)
    """Prompts that were answered to their end."""
    tokens: int = field(default=0, init=False)
    """Of all their prompts and outputs."""
    forget: Callable[[str], None] = field(repr=False)
    """Has the engine release the session of this id."""

    def turn_ended(self, *, prompt: int, output: int) -> None:
        """A turn of `prompt` and `output` tokens is part of the conversation now."""
        self.turns += 1
        self.tokens += prompt + output

    def close(self) -> None:
        """Let the engine forget it. Idempotent."""
        self.forget(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's form of either: {"prompt": text} or {"prompt_token_ids": ids}, and `cache_salt`."""

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content`, and what else the model's chat template knows."""

Conversation: TypeAlias = Sequence[Message]
_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: tuple[int, ...]
    session: Session | None = None
    """The conversation that it continues."""
    cache_salt: str = ""
    """Prefixes are shared only between prompts with the same one."""
    adapter: AdapterRef | None = None
    """The adapter that computes it; None for the model alone."""


def encode_prompts(
    prompts: Prompt | Sequence[Prompt],
    tokenizer: TextTokenizer | None,
    session: Session | Sequence[Session] | None = None,
    *,
    parse_special_tokens: bool = True,
) -> list[Encoded]:
    """One prompt or several, each with the session that it continues, if there are any. `parse_special_tokens`: those
    in texts become control tokens; otherwise they are plain text.

    Raises `InvalidRequestError` naming the first that is neither text nor token ids, or when sessions and prompts
    do not go together.
    """
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and _is_token_id(prompts[0])):
        [only] = _sessions_for(session, 1)
        # A str, or ids judging by the first.
        return [encode_prompt(prompts, tokenizer, only, parse_special_tokens=parse_special_tokens)]  # type: ignore[arg-type]
    encoded = []
    for position, (prompt, each) in enumerate(zip(prompts, _sessions_for(session, len(prompts)), strict=True)):
        try:
            one = encode_prompt(prompt, tokenizer, each, parse_special_tokens=parse_special_tokens)  # type: ignore[arg-type]
            encoded.append(one)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {position}: {error}", param="prompts") from error
    return encoded


def encode_prompt(
    prompt: Prompt,
    tokenizer: TextTokenizer | None,
    session: Session | None = None,
    *,
    parse_special_tokens: bool = True,
) -> Encoded:
    """One prompt. Raises `InvalidRequestError` when it is none."""
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer, session, parse_special_tokens=parse_special_tokens)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("text needs a tokenizer and this model has none: pass token ids", param="prompts")
        begins = session is None or session.turns == 0
        token_ids = tokenizer.encode(prompt, add_special_tokens=begins, parse_special_tokens=parse_special_tokens)
        return Encoded(text=prompt, token_ids=tuple(token_ids), session=session)
    ids = _token_ids(prompt)
    if ids is None:
        raise InvalidRequestError(
            "a prompt must be a string, a list of token ids, or a dict with `prompt` or `prompt_token_ids`",
            param="prompts",
        )
    return Encoded(text=None, token_ids=ids, session=session)


def _encode_mapping(
    prompt: Mapping[str, Any],
    tokenizer: TextTokenizer | None,
    session: Session | None,
    *,
    parse_special_tokens: bool,
) -> Encoded:
    """vLLM's `TextPrompt` and `TokensPrompt`. With ids, the text is only repeated in the output."""
    refused = [key for key, value in prompt.items() if key not in _FIELDS and value is not None]
    if refused:
        raise InvalidRequestError(
            f"a prompt takes {', '.join(_FIELDS)}; not supported here: {', '.join(map(str, refused))}", param="prompts"
        )
    text, ids, salt = (prompt.get(field) for field in _FIELDS)
    if not isinstance(text, str | None) or not isinstance(salt, str | None):
        raise InvalidRequestError("prompt and cache_salt of a prompt must be strings", param="prompts")
    if salt is not None and session is not None:
        raise InvalidRequestError(
            "a session reuses only the prefix of its turns: leave cache_salt out", param="prompts"
        )
    given = text if ids is None else _token_ids(ids)
    if given is None:
        raise InvalidRequestError(
            "a prompt that is a dict needs `prompt`, a string, or `prompt_token_ids`, a list of token ids",
            param="prompts",
        )
    encoded = encode_prompt(given, tokenizer, session, parse_special_tokens=parse_special_tokens)
    return replace(encoded, text=text, cache_salt=salt or "")


def encode_conversations(
    messages: Conversation | Sequence[Conversation],
    tokenizer: TextTokenizer | None,
    *,
    add_generation_prompt: bool,
    template_variables: Mapping[str, Any] | None,
) -> list[Encoded]:
    """One conversation or several, through the chat template.

    Raises `InvalidRequestError` without a template, and for messages that it refuses.
    """
    if tokenizer is None:
        raise InvalidRequestError("a conversation needs a tokenizer and this model has none", param="messages")
    single = len(messages) > 0 and isinstance(messages[0], Mapping)
    conversations: Sequence[Conversation] = [messages] if single else messages  # type: ignore[list-item,assignment]
    return [
        Encoded(
            text=None,
            token_ids=tuple(
                tokenizer.encode_chat(
                    conversation, add_generation_prompt=add_generation_prompt, variables=template_variables
                )
            ),
        )
        for conversation in conversations
    ]


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> Sequence[SamplingParams]:
    """One for each prompt. Raises `InvalidRequestError` when a list has another length than the prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if len(params) != prompts:
        raise InvalidRequestError(
            f"{len(params)} sampling_params for {prompts} prompts: give one, or one for each", param="sampling_params"
        )
    return params


def _sessions_for(session: Session | Sequence[Session] | None, prompts: int) -> Sequence[Session | None]:
    """One for each prompt, None where it continues none."""
    if session is None:
        return [None] * prompts
    sessions = [session] if isinstance(session, Session) else session
    if len(sessions) != prompts:
        raise InvalidRequestError(f"{len(sessions)} sessions for {prompts} prompts: give one for each", param="session")
    if len({each.id for each in sessions}) < prompts:
        raise InvalidRequestError("two prompts continue one session: give them one after the other", param="session")
    return sessions


def _token_ids(prompt: object) -> tuple[int, ...] | None:
    """None for what is no list of token ids; callers need not be typed."""
    if not isinstance(prompt, list | tuple) or not all(map(_is_token_id, prompt)):
        return None
    return tuple(prompt)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
