"""TextTokenizer: a checkpoint's tokenizer without transformers and without torch.

Text becomes ids in two ways, and never otherwise:

    encode       text of a user: control literals in it (`<|im_start|>`) are plain text
    encode_chat  messages through the chat template: the template's control literals are control tokens,
                 those inside the messages are plain text (see `control_literals`)

A client that wants control tokens in a prompt of its own sends token ids. All methods are thread-safe and
release the GIL while they encode, so that long texts can be encoded beside an event loop.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem_engine.errors import CheckpointError, InvalidRequestError
from tandem_engine.tokenizer.chat_template import ChatTemplate
from tandem_engine.tokenizer.control_literals import ControlLiterals, Marks, draw_marks, split_marked
from tandem_engine.tokenizer.files import (
    chat_template_text,
    eos_token_ids,
    read_json,
    read_optional_json,
    special_token_text,
)
from tandem_engine.tokenizer.truncation import Truncation
from tandem_engine.tokenizer.vocabulary import Vocabulary, is_control_literal, read_vocabulary

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokenizer:
    """Everything that turns text into ids and back, for one checkpoint."""

    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    _with_controls: Tokenizer
    _without_controls: Tokenizer
    _literals: ControlLiterals

    @staticmethod
    def load(folder: Path) -> "TextTokenizer":
        """Read `tokenizer.json` and what accompanies it. Raises `CheckpointError` naming file and field."""
        source = folder / "tokenizer.json"
        document = read_json(source)
        with_controls = _build(document, str(source))
        vocabulary = read_vocabulary(with_controls, document, str(source))
        config = read_optional_json(folder / "tokenizer_config.json")
        tokenizer = TextTokenizer(
            vocabulary=vocabulary,
            eos_token_ids=_eos_token_ids(folder, config, with_controls, vocabulary),
            chat_template=_chat_template(folder, config),
            _with_controls=with_controls,
            _without_controls=_build(_without_control_literals(document), str(source)),
            _literals=ControlLiterals(vocabulary.control_literals),
        )
        tokenizer._require_plain_controls(document, str(source))
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def encode(self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        """Ids of user text. `add_special_tokens` adds what the tokenizer puts around a text, such as BOS; a text that
        is cut keeps it, within the length that is asked for."""
        if truncation is None:
            return _encode(self._without_controls, text, add_special_tokens=add_special_tokens)
        return _encode_truncated(self._without_controls, text, truncation, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a rendered conversation. `tools` as OpenAI's requests have them. `continue_final`: they end with the
        content of the last message, so that the model goes on with it.

        Raises `InvalidRequestError` without a chat template and when the template refuses the messages.
        """
        marks, end = draw_marks(), draw_marks().begin
        if continue_final:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + end}]
        text = self._render(
            messages, marks, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        if continue_final:
            text, found, _ = text.rpartition(end)
            if not found:
                raise InvalidRequestError(
                    "this model's chat template rewrites the last message, so it cannot be continued",
                    param="continue_final_message",
                )
        return self._encode_marked(text, marks, add_special_tokens=add_special_tokens)

    def encode_chat_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        last_token: int | None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids that a conversation goes on with after an answer whose newest token is `last_token`, if it is known.

        They begin with what the template writes behind an answer, unless the answer ended with it: a template's end
        of a message mostly is the end-of-sequence token.

        Raises `InvalidRequestError` as `encode_chat`, and for a template that does not write answers as they are.
        """
        marks, answer = draw_marks(), draw_marks().begin
        before = ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer})
        text = self._render(
            [*before, *messages], marks, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        _, found, rest = text.partition(answer)
        if not found:
            raise InvalidRequestError(
                "this model's chat template rewrites earlier answers, so a conversation cannot be continued by its "
                "new messages alone: send all of them",
                param="messages",
            )
        ids = self._encode_marked(rest, marks, add_special_tokens=False)
        return ids[1:] if ids[:1] == [last_token] else ids

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Marks,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template", param="messages")
        return self.chat_template.render(
            self._literals.mark(messages, marks),
            add_generation_prompt=add_generation_prompt,
            tools=self._literals.mark(tools, marks),
            variables=self._literals.mark(variables, marks),
        )

    def _encode_marked(self, text: str, marks: Marks, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for segment in split_marked(text, marks):
            tokenizer = self._without_controls if segment.plain else self._with_controls
            # The template writes BOS itself; whoever asks for more wants it once, at the very beginning.
            ids += _encode(tokenizer, segment.text, add_special_tokens=add_special_tokens and not ids)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _require_plain_controls(self, document: Mapping[str, Any], source: str) -> None:
        # Characters outside the vocabulary become the unknown token, which controls nothing.
        unknown = document["model"].get("unk_token")
        literals = [text for text in self.vocabulary.control_literals if text != unknown]
        controls = {self._with_controls.token_to_id(text) for text in literals}
        for text in literals:
            if controls.intersection(self.encode(text, add_special_tokens=False)):
                raise CheckpointError(
                    f"{source}: the text {text!r} always becomes a control token, so any user could forge it"
                )


def _build(document: Mapping[str, Any], source: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the Rust parser raises bare Exception for every kind of fault
        raise CheckpointError(f"{source} is not a usable tokenizer: {error}") from error
    # Both may be left over from training and would silently shorten or lengthen prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_control_literals(document: Mapping[str, Any]) -> dict[str, Any]:
    added = document.get("added_tokens") or []
    return {**document, "added_tokens": [token for token in added if not is_control_literal(token["content"])]}


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # The batch call gives the GIL up for its whole duration; the single one keeps it for long stretches.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _encode_truncated(
    tokenizer: Tokenizer, text: str, truncation: Truncation, *, add_special_tokens: bool
) -> list[int]:
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    around = tokenizer.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
    encoding.truncate(max(truncation.tokens - around, 0), direction=truncation.side)
    ids = tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids
    # Fewer tokens than the tokenizer adds by itself.
    return list(truncation.of(ids))


def _eos_token_ids(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer, vocabulary: Vocabulary
) -> tuple[int, ...]:
    ids = eos_token_ids(folder)
    text = special_token_text(config.get("eos_token"))
    if not ids and text is not None:
        named = tokenizer.token_to_id(text)
        if named is None:
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: eos_token {text!r} is not in the vocabulary")
        ids = (named,)
    for token in ids:
        if token >= vocabulary.size:
            raise CheckpointError(
                f"{folder}: eos_token_id {token} is outside the vocabulary of {vocabulary.size} tokens"
            )
    return ids


def _chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    found = chat_template_text(folder, config)
    if found is None:
        return None
    template, path = found
    texts = {name: special_token_text(config.get(name)) for name in _SPECIAL_TOKEN_NAMES}
    special_tokens = {name: text for name, text in texts.items() if text is not None}
    return ChatTemplate(template, special_tokens=special_tokens, source=str(path))
