"""Incremental detokenising: token ids in, whole characters out.

A token may end inside a character. The undecided bytes wait until a later token completes or refutes
them, so no piece of a stream holds half a character and the pieces concatenate to the whole text.
"""

from codecs import getincrementaldecoder

from tandem_engine.tokenizer.vocabulary import Vocabulary

_new_utf8_decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one growing output. Not shared between outputs."""

    __slots__ = ("_pending", "_skipped", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, visible: frozenset[int] = frozenset()
    ) -> None:
        """`visible`: special tokens whose text is wanted although special tokens are skipped."""
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids - visible if skip_special_tokens else frozenset[int]()
        self._pending = _new_utf8_decoder("replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none or several."""
        if token_id in self._skipped:
            return ""
        return self._pending.decode(self._vocabulary.bytes_of(token_id))

    def flush(self) -> str:
        """U+FFFD for a character that never was completed, else nothing. Ends the output."""
        return self._pending.decode(b"", final=True)
