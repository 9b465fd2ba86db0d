"""Converts text and messages to token ids and back; rejects prompts that cannot fit."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer, Truncation
from tandem_services.common.errors import bad_request, unavailable
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.limits import (
    check_text_length,
)
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.models.named_tokens import bad_word_ids
from tandem_services.gateway.models.tokenizer_threads import TokenizerThreads

logger = logging.getLogger(__name__)

NO_WORKERS_RETRY_S = 2.0

EACH_CHARACTERS = 16
"""A text or a message takes as long as so many characters beside its own, however short it is."""


@dataclass(kw_only=True, slots=True)
class PromptEncoder:
    """Turns what clients send into ids, and ids that they send into text. Raises `ApiError` 503 when too much of it
    waits for `threads`."""

    model: ServedModel
    threads: TokenizerThreads
    parse_special_tokens: bool = True
    """Special tokens in text prompts become control tokens, where key and request allow it."""

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.model.tokenizer

    def context_length(self) -> int:
        """Raises `ApiError` 503 until there has been a worker: the answer is unknown."""
        length = self.model.last_context_length
        if length is None:
            raise unavailable("No worker can take the request now. Try again later.", retry_after=NO_WORKERS_RETRY_S)
        return length

    def parses_special_tokens(self, asked: bool | None, caller: Caller) -> bool:
        """Whether special tokens in the text prompts of a request become control tokens. `asked`: the request's field.

        Raises `ApiError` 400 when it requests what gateway or key forbid.
        """
        allowed = self.parse_special_tokens and caller.tenant.parse_special_tokens
        if asked and not allowed:
            raise bad_request(
                "parse_special_tokens: special tokens are plain text in text prompts here: leave it out, or send token "
                "ids",
                "parse_special_tokens",
            )
        return allowed if asked is None else asked

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        parse_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        [ids] = await self.encode_all(
            [text],
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            truncation=truncation,
            param="prompt",
        )
        return ids

    async def encode_middle(
        self, prefix: str, suffix: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> tuple[int, ...]:
        """A prompt that requests the text between both. Raises `InvalidRequestError` 400 for models that cannot."""
        characters = len(prefix) + len(suffix)
        check_text_length(characters, self.model.longest_token, self.context_length(), "prompt")
        work = partial(
            self.tokenizer.encode_middle,
            prefix,
            suffix,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
        return tuple(await self.threads.run(work, characters=characters))

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        param: str,
        parse_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[tuple[int, ...]]:
        """Of each text its ids: in one piece of work, however many there are. `param`: the field they are from."""
        for text in texts if truncation is None else ():
            check_text_length(len(text), self.model.longest_token, self.context_length(), param)

        def work() -> list[tuple[int, ...]]:
            encode = partial(
                self.tokenizer.encode,
                add_special_tokens=add_special_tokens,
                parse_special_tokens=parse_special_tokens,
                truncation=truncation,
            )
            return [tuple(encode(text)) for text in texts]

        characters = sum(map(len, texts)) + EACH_CHARACTERS * len(texts)
        return await self.threads.run(work, characters=characters, brief=self._lengths_tell(texts))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        work = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
            continue_final=continue_final,
            tools=tools,
            variables=variables,
        )
        characters = self._characters(messages, tools, variables, may_be_cut=truncation is not None)
        brief = self._may_be_brief(messages, tools, variables)
        ids = await self.threads.run(work, characters=characters, brief=brief)
        return tuple(ids) if truncation is None else truncation.of(ids)

    async def encode_chat_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        last_token: int | None,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """New messages of a conversation whose beginning, up to `last_token`, a worker keeps."""
        work = partial(
            self.tokenizer.encode_chat_turn,
            messages,
            last_token=last_token,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
        characters = self._characters(messages, tools, variables)
        brief = self._may_be_brief(messages, tools, variables)
        return tuple(await self.threads.run(work, characters=characters, brief=brief))

    async def bad_words(self, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Token sequences of `words`: see `bad_word_ids`."""
        if not words:
            return ()
        work = partial(bad_word_ids, words, self.tokenizer)
        return await self.threads.run(work, characters=sum(map(len, words)))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids of the vocabulary."""
        work = partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self.threads.run(work, characters=len(token_ids))

    async def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token alone; U+FFFD for bytes that are not UTF-8."""

        def work() -> list[str]:
            return [self.tokenizer.vocabulary.bytes_of(token).decode("utf-8", "replace") for token in token_ids]

        return await self.threads.run(work, characters=len(token_ids))

    def _may_be_brief(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> bool:
        return not (tools or variables) and self._lengths_tell(message["content"] for message in messages)

    def _lengths_tell(self, texts: Iterable[str]) -> bool:
        """Whether the lengths of texts say how long they take at most."""
        return not self.tokenizer.expands_text or all(map(str.isascii, texts))

    def _characters(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        may_be_cut: bool = False,
    ) -> int:
        """Raises `ApiError` 400 for more than can be answered. Tools, variables and what messages have beside their
        content count for the time they take, not for their length: a template may leave out parts of them."""
        characters = sum([len(message["content"]) for message in messages])
        if not may_be_cut:
            check_text_length(characters, self.model.longest_token, self.context_length(), "messages")
        beside: list[Any] = [value for value in (tools, variables) if value]
        # Most have a role and a content alone; others may have calls and reasoning of any length.
        beside += [message for message in messages if len(message) > 2]
        characters += EACH_CHARACTERS * len(messages)
        return characters + (len(msgspec.json.encode(beside)) if beside else 0)
