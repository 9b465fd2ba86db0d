"""Text and messages to token ids, off the event loop when they are long, refused when they cannot fit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import unavailable
from tandem_services.gateway.limits import (
    INLINE_ENCODE_CHARACTERS,
    check_text_length,
)
from tandem_services.gateway.models import ServedModel
from tandem_services.gateway.openai_schemas import ChatTemplateVariables

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: ChatTemplateVariables | None,
    ) -> tuple[int, ...]:
        work = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
            tools=tools,
            variables=_given(variables),
        )
        return await self._run(work, self._characters(messages, tools))

    async def encode_chat_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        last_token: int | None,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: ChatTemplateVariables | None,
    ) -> tuple[int, ...]:
        """New messages of a conversation whose beginning, up to `last_token`, a worker keeps."""
        work = partial(
            self.tokenizer.encode_chat_turn,
            messages,
            last_token=last_token,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=_given(variables),
        )
        return await self._run(work, self._characters(messages, tools))

    def _characters(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Raises `ApiError` 400 for more than can be answered. Tools count for the time they take, not for their
        length: a template may leave out parts of them."""
        characters = sum(len(message["content"]) for message in messages)
        check_text_length(characters, self.model.longest_token, self.context_length(), "messages")
        return characters + (len(msgspec.json.encode(tools)) if tools else 0)

    async def _run(self, work: Callable[[], list[int]], characters: int) -> tuple[int, ...]:
        if characters <= INLINE_ENCODE_CHARACTERS:
            return tuple(work())
        return tuple(await asyncio.get_running_loop().run_in_executor(self.executor, work))


def _given(variables: ChatTemplateVariables | None) -> dict[str, Any]:
    if variables is None:
        return {}
    return {name: value for name, value in msgspec.structs.asdict(variables).items() if value is not None}
