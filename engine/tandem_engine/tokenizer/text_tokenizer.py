"""TextTokenizer: a checkpoint's tokenizer without transformers and without torch.

Text becomes ids in two ways:

    encode       a text prompt: special tokens in it (`<|im_start|>`) become control tokens, as transformers and vLLM
                 do, unless `parse_special_tokens` is false; then they are plain text
    encode_chat  messages through the chat template: special tokens that the template writes become control tokens,
                 those inside messages, tools and variables are plain text (see `chat_encoding`)

Added tokens that are not special, such as `<think>` in many checkpoints, are parsed in both. All methods are
thread-safe and release the GIL while they encode, so long texts can be encoded next to an event loop.
"""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from tandem_engine.base.cgroups import usable_cpus
from tandem_engine.base.environment import set_default
from tandem_engine.base.errors import CheckpointError, InvalidRequestError
from tandem_engine.tokenizer.chat_encoding import ChatEncoder
from tandem_engine.tokenizer.chat_template import ChatTemplate, ControlLiterals
from tandem_engine.tokenizer.fill_in_middle import FimMarks, find_fim_marks
from tandem_engine.tokenizer.traced_text import TracedText
from tandem_engine.tokenizer.vocabulary import Vocabulary, read_vocabulary

MAX_FILE_BYTES = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` when the file is absent, too large, or holds anything else."""
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(document).__name__}")
    return document


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, but an absent file is an empty object."""
    return read_json(path) if path.exists() else {}


def read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_FILE_BYTES} are read")
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"no {path.name} in {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text") from error


def special_token_text(value: Any) -> str | None:
    """`tokenizer_config.json` spells a special token as a string or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def named_special_tokens(tokenizer_config: dict[str, Any]) -> frozenset[str]:
    """Texts that `tokenizer_config.json` makes special, or control tokens of chats; `tokenizer.json` has others."""
    named = [value for name, value in tokenizer_config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens", "chat_control_tokens"):
        more = tokenizer_config.get(name) or ()
        named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    decoder = tokenizer_config.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else ()
    named += [entry for entry in entries if isinstance(entry, dict) and entry.get("special")]
    return frozenset(text for text in map(special_token_text, named) if text)


def chat_template_text(folder: Path, tokenizer_config: dict[str, Any]) -> tuple[str, Path] | None:
    """The template and its file: `chat_template.jinja`, else `tokenizer_config.json` (its `default` of several)."""
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.exists():
        return read_text(jinja_file), jinja_file
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return (template, folder / "tokenizer_config.json") if isinstance(template, str) else None


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an output: the first of generation_config.json and config.json that names any."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(folder / name).get("eos_token_id")
        if value is not None:
            return _id_tuple(value, folder / name)
    return ()


def _id_tuple(value: Any, path: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r:.100}")
    return tuple(ids)


TruncationSide = Literal["left", "right"]
"""The end that is cut off: `left` keeps the newest tokens."""


class Truncation(NamedTuple):
    tokens: int
    """At most so many stay: at least 1."""
    side: TruncationSide

    def of(self, ids: Sequence[int]) -> tuple[int, ...]:
        kept = ids[-self.tokens :] if self.side == "left" else ids[: self.tokens]
        return tuple(kept)


_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokenizer:
    """Everything that turns text into ids and back, for one checkpoint."""

    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    fim: FimMarks | None
    """None: the vocabulary has no marks to fill in the middle of a text."""
    expands_text: bool
    """Its normalizer writes some characters as many: the length of a text does not say how long it takes."""
    _with_controls: Tokenizer
    _without_controls: Tokenizer
    _chats: ChatEncoder
    _literals: ControlLiterals
    _follows_all: bool
    """Every rendering follows where its text comes from: see `control_literals`."""

    @staticmethod
    def load(folder: Path) -> "TextTokenizer":
        """Read `tokenizer.json` and what accompanies it. Raises `CheckpointError` naming file and field."""
        # Else tokenizers start a thread for each CPU of the machine, whatever this container may use.
        set_default("RAYON_NUM_THREADS", str(usable_cpus()))
        source = folder / "tokenizer.json"
        text = read_text(source)
        with_controls = _build(text, str(source))
        document = _read_document(text, str(source))
        config = read_optional_json(folder / "tokenizer_config.json")
        special = named_special_tokens(config)
        vocabulary = read_vocabulary(with_controls, document.decoder, str(source), also_special=special)
        literals = vocabulary.control_literals
        added = with_controls.get_added_tokens_decoder()
        without_controls = _without_added(with_controls, document, literals)
        template = _chat_template(folder, config)
        eos = _eos_token_ids(folder, config, with_controls, vocabulary)
        unknown = document.model.unk_token
        _require_plain_controls(with_controls, without_controls, set(literals) - {unknown}, str(source))
        control_literals = ControlLiterals(literals)
        resembling = _matches_normalized(document, literals)
        return TextTokenizer(
            vocabulary=vocabulary,
            eos_token_ids=eos,
            chat_template=template,
            fim=find_fim_marks({token.content: i for i, token in added.items()}.get),
            expands_text=_expands_text(with_controls),
            _with_controls=with_controls,
            _without_controls=without_controls,
            _chats=ChatEncoder.of(with_controls, without_controls, literals, unknown=unknown, resembling=resembling),
            _literals=control_literals,
            _follows_all=template is not None and _follows_all(template, control_literals, resembling=resembling),
        )

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Ids of a text prompt. `add_special_tokens` adds what the tokenizer puts around a text, such as BOS; a text
        that is cut keeps it, within the length that is asked for. `parse_special_tokens`: special tokens in the text
        become control tokens; otherwise they are plain text."""
        tokenizer = self._with_controls if parse_special_tokens else self._without_controls
        if truncation is None:
            return _encode(tokenizer, text, add_special_tokens=add_special_tokens)
        return _encode_truncated(tokenizer, text, truncation, add_special_tokens=add_special_tokens)

    def encode_middle(
        self, prefix: str, suffix: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Ids that ask for the text between `prefix` and `suffix`. `add_special_tokens` begins them with BOS, where the
        tokenizer begins texts so.

        Raises `InvalidRequestError` when the tokenizer has no marks for that.
        """
        if self.fim is None:
            raise InvalidRequestError(
                "this model's tokenizer has no tokens that mark prefix and suffix: leave suffix out", param="suffix"
            )
        tokenizer = self._with_controls if parse_special_tokens else self._without_controls
        # Behind a special token, as the marks are.
        mark = self._chats.placeholder
        before, after = (_encode(tokenizer, mark + text, add_special_tokens=False)[1:] for text in (prefix, suffix))
        begin = _encode(self._with_controls, "", add_special_tokens=True) if add_special_tokens else ()
        return [*(token for token in begin if token not in self.eos_token_ids), *self.fim.around(before, after)]

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
        content of the last message, so that the model continues it.

        Raises `InvalidRequestError` without a chat template and when the template refuses the messages.
        """
        mark = f"{_draw_mark()} " if continue_final else ""
        if continue_final:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + mark}]
        text = self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        if continue_final:
            text = _before_mark(text, mark)
        return self._encode_rendered(text, add_special_tokens=add_special_tokens)

    def encode_chat_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        last_token: int | None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids that a conversation continues with after an answer whose newest token is `last_token`, if it is known.

        They begin with what the template writes behind an answer, unless the answer ended with it: a template's end
        of a message mostly is the end-of-sequence token.

        Raises `InvalidRequestError` as `encode_chat`, and for a template that does not write answers as they are.
        """
        answer = _draw_mark()
        before = ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer})
        text = self._render(
            [*before, *messages], add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        _, found, rest = text.partition(answer)
        if not found or answer in rest:
            raise InvalidRequestError(
                "this model's chat template rewrites earlier answers, so a conversation cannot be continued by its "
                "new messages alone: send all of them",
                param="messages",
            )
        ids = self._encode_rendered(rest, add_special_tokens=False)
        return ids[1:] if ids[:1] == [last_token] else ids

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """The prompt text; `TracedText` where text of the client could be part of a control literal."""
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template", param="messages")
        follow = self._follows_all or self._literals.may_begin_in((messages, tools, variables))
        render = self.chat_template.render_traced if follow else self.chat_template.render
        return render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)

    def _encode_rendered(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if isinstance(text, TracedText):
            return self._chats.encode(text, add_special_tokens=add_special_tokens)
        return _encode(self._with_controls, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _follows_all(template: ChatTemplate, literals: ControlLiterals, *, resembling: bool) -> bool:
    recased = template.changes_case and literals.begin_with_letters
    return resembling or recased or template.translates or literals.pieced_together(template.constants)


def _require_plain_controls(
    with_controls: Tokenizer, without_controls: Tokenizer, literals: Collection[str], source: str
) -> None:
    # The unknown token is not among them: characters outside the vocabulary become it, and it controls nothing.
    controls = {with_controls.token_to_id(text) for text in literals}
    for text in literals:
        if controls.intersection(_encode(without_controls, text, add_special_tokens=False)):
            raise CheckpointError(
                f"{source}: the text {text!r} always becomes a control token, so any user could forge it"
            )


def _draw_mark() -> str:
    """Text that no client can guess. It begins and ends with noncharacters, which survive trimming and JSON."""
    return f"\ufdd0{secrets.token_hex(8)}\ufdd1"


def _before_mark(text: str, mark: str) -> str:
    """What stands before the last `mark`, which ends with a space. A template that trimmed the space has trimmed the
    content that the mark was appended to."""
    before, found, after = text.rpartition(mark.rstrip())
    if not found or mark.rstrip() in before:
        raise InvalidRequestError(
            "this model's chat template rewrites the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


class _Model(msgspec.Struct, frozen=True):
    unk_token: str | None = None


class _AddedToken(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool

    def built(self) -> AddedToken:
        return AddedToken(**msgspec.structs.asdict(self))


class _Document(msgspec.Struct, frozen=True):
    """What is read of `tokenizer.json` here. Vocabulary and merges are the library's: as objects of Python they took
    half of the time."""

    model: _Model
    added_tokens: tuple[_AddedToken, ...] | None = None
    normalizer: Any = None
    decoder: Any = None


def _read_document(text: str, source: str) -> _Document:
    try:
        return msgspec.json.decode(text, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{source} is not a usable tokenizer: {error}") from error


def _build(text: str, source: str) -> Tokenizer:
    """Holds the GIL, whatever the thread: it is called once for each file."""
    try:
        tokenizer = Tokenizer.from_buffer(text.encode())
    except Exception as error:  # the Rust parser raises bare Exception for every kind of fault
        raise CheckpointError(f"{source} is not a usable tokenizer: {error}") from error
    # Both may be left over from training and would silently shorten or lengthen prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_added(tokenizer: Tokenizer, document: _Document, contents: Collection[str]) -> Tokenizer:
    """The same without these added tokens; all others keep their ids. Both share model, normalizer and the other parts
    in memory.
    """
    shared = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(shared, part, value)
    replaced = (
        _replaced(token, tokenizer) if token.content in contents else token for token in document.added_tokens or ()
    )
    # In the order of the file, by which a token that is not in the vocabulary gets its id.
    for special, tokens in groupby(filter(None, replaced), key=attrgetter("special")):
        add = shared.add_special_tokens if special else shared.add_tokens
        add([token.built() for token in tokens])
    return shared


def _replaced(token: _AddedToken, tokenizer: Tokenizer) -> _AddedToken | None:
    """A token that no client can write, with the same id. Without it, later tokens would get lower ids, which are
    those of control tokens. None where the vocabulary has the id.
    """
    if tokenizer.model.token_to_id(token.content) is not None:
        return None
    return msgspec.structs.replace(token, content=_draw_mark(), normalized=False)


def _matches_normalized(document: _Document, contents: Collection[str]) -> bool:
    """Whether text that only resembles a special token can become it."""
    return document.normalizer is not None and any(
        token.content in contents and token.normalized for token in document.added_tokens or ()
    )


_MAX_NORMALIZED = "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"
"""18 characters in the compatibility forms of Unicode, more than any other. In all other forms it is itself."""


def _expands_text(tokenizer: Tokenizer) -> bool:
    return tokenizer.normalizer is not None and len(tokenizer.normalizer.normalize_str(_MAX_NORMALIZED)) > 4


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
