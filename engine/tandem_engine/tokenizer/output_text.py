"""The text of one output, token by token: incremental detokenizing, and stop strings.

Gateways return the text; engines only check whether it has ended. Both use `OutputText`, so that they agree on which
token completes a stop string.

`Detokenizer`: token ids in, whole characters out. A token may end inside a character. Its undecided bytes wait until a
later token completes or refutes them, so no piece of a stream has half a character and the pieces concatenate to the
whole text.

`StopWindow` withholds text that may become a stop string, so that its beginning never reaches the client. The result
does not depend on how the text is cut into pieces: of all occurrences the one that ends first wins, and of those that
end together the longest. An early match inside a long piece is not missed [stop-window].
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.vocabulary import Vocabulary


class Detokenizer:
    """Text of one growing output. Not shared between outputs."""

    __slots__ = ("_bytes", "_pending", "_skipped")

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, visible: frozenset[int] = frozenset()
    ) -> None:
        """`visible`: special tokens whose text is wanted although special tokens are skipped."""
        self._bytes = vocabulary.token_bytes
        self._skipped = vocabulary.special_ids - visible if skip_special_tokens else frozenset[int]()
        self._pending = b""
        """Of a character that is not complete."""

    def push(self, *token_ids: int) -> str:
        """The characters that `token_ids` complete; often none or several."""
        table, data = self._bytes, self._pending
        for token_id in token_ids:
            # A model's head may be padded beyond its tokenizer: such ids stand for nothing.
            if 0 <= token_id < len(table) and token_id not in self._skipped:
                data += table[token_id]
        text, used = utf_8_decode(data, "replace", False)  # the function names no parameters
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """U+FFFD for a character that never was completed, else nothing. Ends the output."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


class Cut(NamedTuple):
    """What a piece of text became."""

    text: str
    """Safe to show now."""
    matched: str | None
    """The stop string that ended the output; nothing may be pushed after it."""


class StopWindow:
    """Looks for `stops` in one output. With `keep_match` the matched text stays in the output."""

    __slots__ = ("_held", "_keep_match", "_prefixes", "_stops")

    def __init__(self, stops: tuple[str, ...], *, keep_match: bool = False) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._prefixes = tuple({stop[:length] for stop in stops for length in range(1, len(stop))})
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> Cut:
        """Add `piece`. A stop string that ends in an unarmed piece (min_tokens) is ordinary text."""
        if not self._stops:
            return Cut(piece, None)
        window = self._held + piece
        match = self._first_match(window, len(self._held)) if armed else None
        if match is not None:
            start, stop = match
            self._held = ""
            return Cut(window[: start + len(stop) * self._keep_match], stop)
        kept = self._undecided(window)
        self._held = window[len(window) - kept :]
        return Cut(window[: len(window) - kept], None)

    def flush(self) -> str:
        """Text held back when the output ended for another reason."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, window: str, seen: int) -> tuple[int, str] | None:
        """Start and text of the first match that ends after the `seen` characters that were searched before."""
        starts = ((window.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self._stops)
        found = [(start, stop) for start, stop in starts if start >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _undecided(self, window: str) -> int:
        """Length of the longest end of `window` with which a stop string begins."""
        return max((len(prefix) for prefix in self._prefixes if window.endswith(prefix)), default=0)


class OutputText:
    """A stop string counts when it ends in a token after the first `min_tokens`, as EOS does."""

    __slots__ = ("_count", "_detokenizer", "_min_tokens", "_stops", "_window", "characters")

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        *,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens, visible=visible)
        self._stops = bool(sampling.stop)
        self._window = StopWindow(sampling.stop, keep_match=keep_stop)
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self.characters = 0
        """Characters of all tokens so far, held back or not."""

    def push(self, token_id: int) -> Cut:
        """Add one token: the text that can be shown now, and the stop string that it completed, if any."""
        self._count += 1
        piece = self._detokenizer.push(token_id)
        self.characters += len(piece)
        if not self._stops:
            return Cut(piece, None)
        return self._window.push(piece, armed=self._count > self._min_tokens)

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """As `push` of each, of an output without stop strings: all text that can be shown now."""
        self._count += len(token_ids)
        text = self._detokenizer.push(*token_ids)
        self.characters += len(text)
        return text

    def flush(self) -> Cut:
        """The rest, when the output ends without a stop string. An unfinished character may complete one."""
        cut = self._window.push(self._detokenizer.flush(), armed=self._count > self._min_tokens)
        return cut if cut.matched else Cut(cut.text + self._window.flush(), None)
