"""Text and messages to token ids, off the event loop when they are long, refused when they cannot fit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import bad_request, unavailable
from tandem_services.gateway.limits import (
    INLINE_ENCODE_CHARACTERS,
    MAX_MESSAGES,
    check_text_length,
)
from tandem_services.gateway.models import ServedModel
from tandem_services.gateway.openai_schemas import ChatMessage, ChatTemplateVariables, ContentPart

NO_WORKERS_RETRY_S = 2.0


@dataclass(kw_only=True, slots=True)
class PromptEncoder:
    """Turns what clients send into ids. `executor` runs threads."""

    model: ServedModel
    executor: Executor

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.model.tokenizer

    def context_length(self) -> int:
        """Raises `ApiError` 503 as long as there has been no worker: nobody can tell."""
        length = self.model.last_context_length
        if length is None:
            raise unavailable("No worker can take the request now. Try again later.", retry_after=NO_WORKERS_RETRY_S)
        return length

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        check_text_length(len(text), self.model.longest_token, self.context_length(), param)
        work = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(work, len(text))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        variables: ChatTemplateVariables | None,
    ) -> tuple[int, ...]:
        work = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
            variables=_given(variables),
        )
        return await self._run(work, self._characters(messages))

    async def encode_chat_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        last_token: int | None,
        add_generation_prompt: bool,
        variables: ChatTemplateVariables | None,
    ) -> tuple[int, ...]:
        """New messages of a conversation whose beginning, up to `last_token`, a worker keeps."""
        work = partial(
            self.tokenizer.encode_chat_turn,
            messages,
            last_token=last_token,
            add_generation_prompt=add_generation_prompt,
            variables=_given(variables),
        )
        return await self._run(work, self._characters(messages))

    def _characters(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Raises `ApiError` 400 for more than can be answered."""
        characters = sum(len(message["content"]) for message in messages)
        check_text_length(characters, self.model.longest_token, self.context_length(), "messages")
        return characters

    async def _run(self, work: Callable[[], list[int]], characters: int) -> tuple[int, ...]:
        if characters <= INLINE_ENCODE_CHARACTERS:
            return tuple(work())
        return tuple(await asyncio.get_running_loop().run_in_executor(self.executor, work))


def template_messages(messages: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Raises `ApiError` 400 naming the message at fault."""
    if not messages:
        raise bad_request("messages must have at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages takes at most {MAX_MESSAGES} messages, got {len(messages)}", "messages")
    if [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
        raise bad_request("messages must not end with two assistant messages", "messages")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, param: str) -> dict[str, Any]:
    if message.role == "tool" or message.tool_calls or message.tool_call_id is not None:
        raise bad_request(f"{param}: tool messages are not supported yet", param)
    content = _text(message.content, f"{param}.content")
    # Templates predate the newer name of the same role.
    role = "system" if message.role == "developer" else message.role
    entry = {"role": role, "content": content}
    return entry if message.name is None else {**entry, "name": message.name}


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None:
        raise bad_request(f"{param} is required", param)
    if isinstance(content, str):
        return content
    for position, part in enumerate(content):
        if part.type != "text" or part.text is None:
            where = f"{param}[{position}]"
            raise bad_request(f"{where}: only parts of type text with a text are supported", where)
    return "\n".join(part.text or "" for part in content)


def _given(variables: ChatTemplateVariables | None) -> dict[str, Any]:
    if variables is None:
        return {}
    return {name: value for name, value in msgspec.structs.asdict(variables).items() if value is not None}
