"""Vocabulary: which bytes each token id stands for.

Text is decoded from this table instead of through `tokenizers.Tokenizer.decode`, because bytes compose
and strings do not: a token may hold a third of a character, so streaming, logprob `bytes` and whole texts
agree only when all of them are made of the same bytes.

Two ways of spelling bytes cover the supported families:

    byte-level      each character of a token stands for one byte (GPT-2 alphabet; qwen2, qwen3, llama 3)
    sentencepiece   "▁" stands for a space and "<0xE4>" for a byte (llama 1 and 2)

Texts of special tokens (`<|im_start|>`, …) are *control literals*: in a conversation only the chat template may produce
them, so a message that contains one is encoded as plain text (CVE-2026-44222). Other added tokens (`<think>` in many
checkpoints, `<b>`) are ordinary vocabulary.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tandem_engine.base.errors import CheckpointError

MAX_VOCABULARY = 4 << 20
"""Ids above this are a broken file, not a vocabulary, and must not size a table."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Immutable facts about token ids; shared by every request and thread."""

    token_bytes: tuple[bytes, ...]
    """Bytes by token id; empty for ids that name nothing."""
    special_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out of text."""
    control_literals: tuple[str, ...]
    """Texts of the special tokens, which messages of a conversation never turn into."""
    strips_first_space: bool
    """Sentencepiece writes a space before the first word of a text and takes it away again."""

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token. A model's head may be padded beyond its tokenizer: such ids stand for nothing."""
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.special_ids)]
        text = b"".join(map(self.bytes_of, kept)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text


def read_vocabulary(
    tokenizer: Tokenizer, decoder: Any, source: str, *, also_special: Collection[str] = ()
) -> Vocabulary:
    """Build the table from a tokenizer and the JSON of its decoder. `also_special`: texts of added tokens that are
    special although `tokenizer.json` does not say so.

    Raises `CheckpointError` for a decoder that spells bytes in neither of the two ways, and for absurd ids.
    """
    pieces = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(pieces.values(), default=-1)
    if not 0 <= largest < MAX_VOCABULARY:
        raise CheckpointError(f"{source}: token ids end at {largest}, expected 0 to {MAX_VOCABULARY - 1}")
    spelling = _spelling(decoder, source)
    table = [b""] * (largest + 1)
    for piece, token_id in pieces.items():
        table[token_id] = spelling(piece)
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        token_bytes=tuple(table),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        control_literals=tuple(
            token.content
            for token in added.values()
            if (token.special or token.content in also_special) and token.content.strip()
        ),
        strips_first_space=spelling is _sentencepiece_bytes,
    )


def _spelling(decoder: Any, source: str) -> Callable[[str], bytes]:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_bytes
    raise CheckpointError(
        f"{source}: decoder {sorted(kinds) or None} is not supported, expected ByteLevel, ByteFallback or Metaspace"
    )


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders")
    if isinstance(inner, list):
        return set().union(*map(_decoder_kinds, inner))
    return {str(decoder.get("type"))}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte: itself when visible in Latin-1, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[character] for character in piece])
    except KeyError:
        # An added token is spelled in plain characters, which need not be in the alphabet.
        return piece.encode("utf-8")


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode("utf-8")
