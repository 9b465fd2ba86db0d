"""The model's vocabulary as llguidance wants it: built once, when the first grammar needs it."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from llguidance import LLTokenizer

from tandem_engine.errors import InvalidRequestError


@dataclass(kw_only=True, slots=True)
class GuidanceVocabulary:
    """Shared by all grammars of a model, whatever thread compiles them.

    Building takes a quarter of a second for 128k tokens, without the interpreter lock.
    """

    tokenizer_file: Path
    """`tokenizer.json`"""
    vocab_size: int
    """Of the model, whose logits may be wider than the tokenizer."""
    eos_token_ids: tuple[int, ...]
    """At least one: how a model ends an output whose grammar would let it go on."""
    _built: LLTokenizer | None = None
    _lock: Lock = field(default_factory=Lock)

    def tokenizer(self) -> LLTokenizer:
        """Raises `InvalidRequestError` when llguidance does not know this kind of tokenizer: no request can help it."""
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> LLTokenizer:
        document = self.tokenizer_file.read_text("utf-8")
        eos = [*self.eos_token_ids]
        try:
            return LLTokenizer(document, n_vocab=self.vocab_size, eos_token=eos)
        except ValueError:
            # Either the tokenizer knows more tokens than the model, or it is of a kind unknown to llguidance.
            return self._build_at_its_own_size(document, eos)

    def _build_at_its_own_size(self, document: str, eos: list[int]) -> LLTokenizer:
        try:
            return LLTokenizer(document, eos_token=eos)
        except ValueError as error:
            raise InvalidRequestError(
                f"grammars do not work with this model's tokenizer: {error}", param="grammar"
            ) from error
