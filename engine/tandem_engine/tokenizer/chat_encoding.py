"""ChatEncoder: rendered conversations as ids in which no text of a client has become a control token.

    1. encode    the whole text, as transformers does
    2. judge     a control token whose text the template wrote stays; one with a character of the client's is forged
    3. replace   the client's part of each forged literal by a placeholder token, and encode again, until none is forged
    4. fill in   the ids of that part as plain text at the placeholder

If all literals in the text are the template's, step 1 is enough: judging needs the place of every token, which takes
tokenizers more than twice the time.

So all ids except those of forged literals are what transformers returns, also where a tokenizer treats the beginning of
a text, or the text after a special token, differently. The placeholder is a token that only this process has.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.tokenizer.traced_text import CONTENT, TEMPLATE, TracedText, origin_of

MAX_PASSES = 8
"""Replacing a literal can uncover another one that overlapped it; templates and contents that need more are refused."""


class _Judged(NamedTuple):
    """A text in which forged literals are placeholders, and those literals in their order."""

    text: str
    origin: bytes
    forged: list[str]


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Immutable and thread-safe."""

    with_controls: Tokenizer
    without_controls: Tokenizer
    """The same vocabulary without special tokens."""
    controls: dict[int, str]
    """Literals by the ids of all special tokens."""
    unknown: int | None
    """The id of characters that are not in the vocabulary, if there is one."""
    placeholder: str
    placeholder_id: int
    resembling: bool
    """Text that only resembles a literal can become its token."""

    @staticmethod
    def of(
        with_controls: Tokenizer,
        without_controls: Tokenizer,
        literals: Iterable[str],
        *,
        unknown: str | None,
        resembling: bool,
    ) -> "ChatEncoder":
        """Adds the placeholder to both tokenizers. `unknown`: text of the unknown token."""
        ids = {with_controls.token_to_id(text): text for text in literals}
        placeholder = f"\ufdd0{secrets.token_hex(16)}\ufdd1"
        for tokenizer in (with_controls, without_controls):
            tokenizer.add_special_tokens([AddedToken(placeholder, normalized=False)])
        placeholder_id = with_controls.token_to_id(placeholder)
        assert placeholder_id is not None, "it was just added"
        return ChatEncoder(
            with_controls,
            without_controls,
            {token: text for token, text in ids.items() if token is not None},
            None if unknown is None else with_controls.token_to_id(unknown),
            placeholder,
            placeholder_id,
            resembling,
        )

    def encode(self, text: TracedText, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered text.

        Raises `InvalidRequestError` where it cannot be decided whether a literal is the template's.
        """
        judged = _Judged(str.__add__(text, ""), origin_of(text), [])
        for _ in range(MAX_PASSES):
            [fast] = self.with_controls.encode_batch_fast([judged.text], add_special_tokens=add_special_tokens)
            if self._is_all_of_the_template(fast.ids, judged):
                return self._filled_in(fast.ids, judged.forged)
            [encoding] = self.with_controls.encode_batch([judged.text], add_special_tokens=add_special_tokens)
            replaced = self._judge(encoding, judged)
            if replaced is judged:
                return self._filled_in(encoding.ids, judged.forged)
            judged = replaced
        raise _undecided("of several special tokens that overlap")

    def _is_all_of_the_template(self, ids: Sequence[int], judged: _Judged) -> bool:
        """Whether every literal in the text that could be one of the control tokens in `ids` is the template's."""
        if self.resembling:
            return False
        found = (self.controls[token] for token in self.controls.keys() & set(ids))
        return all(
            judged.origin[start : start + len(literal)] == TEMPLATE * len(literal)
            for literal in found
            for start in _occurrences(literal, judged.text)
        )

    def _judge(self, encoding: Encoding, before: _Judged) -> _Judged:
        """`before` itself when no control token is forged."""
        text, origin, known, forged = before.text, before.origin, iter(before.forged), list[str]()
        texts, origins, end = list[str](), list[bytes](), 0
        for token, span in zip(encoding.ids, encoding.offsets, strict=True):
            if token == self.placeholder_id:
                forged.append(next(known))
            elif token in self.controls and self._is_forged(token, text, origin, span):
                start, stop = _clients_run(origin, *self._literal_span(token, text, span))
                texts += [text[end:start], self.placeholder]
                origins += [origin[end:start], TEMPLATE * len(self.placeholder)]
                forged.append(text[start:stop])
                end = stop
        if not texts:
            return before
        return _Judged("".join([*texts, text[end:]]), b"".join([*origins, origin[end:]]), forged)

    def _is_forged(self, token: int, text: str, origin: bytes, span: tuple[int, int]) -> bool:
        start, stop = self._literal_span(token, text, span)
        if start == stop:
            return False  # put around the text by the tokenizer itself
        if token == self.unknown and text[start:stop] != self.controls[token]:
            return False  # a character that is not in the vocabulary
        origins = set(origin[start:stop])
        if origins == set(TEMPLATE):
            return False
        if not origins & set(CONTENT):
            raise _undecided(repr(self.controls[token]))
        return True

    def _literal_span(self, token: int, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Some special tokens take the white space beside them; that stays what it is."""
        start, stop = span
        literal = self.controls[token]
        found = text.find(literal, start, stop)
        return span if found < 0 else (found, found + len(literal))

    def _filled_in(self, ids: Sequence[int], forged: Sequence[str]) -> list[int]:
        if not forged:
            return list(ids)
        plain = {text: self._plain(text) for text in set(forged)}
        literals, filled = iter(forged), list[int]()
        for token in ids:
            filled += plain[next(literals)] if token == self.placeholder_id else (token,)
        return filled

    def _plain(self, text: str) -> Sequence[int]:
        # Behind a special token, where no tokenizer adds what it writes at the beginning of a text.
        encoding = self.without_controls.encode(self.placeholder + text, add_special_tokens=False)
        ids = encoding.ids[1:]
        if not self.controls.keys().isdisjoint(ids):
            raise _undecided(repr(text))
        return ids


def _clients_run(origin: bytes, start: int, stop: int) -> tuple[int, int]:
    """The first run of text within a forged literal that the template did not write. What the template wrote there may
    be a part of its own next literal."""
    begin = next(i for i in range(start, stop) if origin[i] != TEMPLATE[0])
    end = next((i for i in range(begin, stop) if origin[i] == TEMPLATE[0]), stop)
    return begin, end


def _occurrences(literal: str, text: str) -> Iterator[int]:
    """Where it begins, those that overlap included."""
    start = text.find(literal)
    while start >= 0:
        yield start
        start = text.find(literal, start + 1)


def _undecided(literal: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"these messages hold the text of the special token {literal} where the model's chat template hides which text "
        "is the template's own: leave it out",
        param="messages",
    )
