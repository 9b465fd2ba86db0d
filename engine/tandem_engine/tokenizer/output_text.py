"""The text of one output, token by token, stop strings applied.

Gateways show the text; engines only ask whether it has ended. Both use this class, so that they agree on
which token completes a stop string.
"""

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.detokenize import Detokenizer
from tandem_engine.tokenizer.stop_strings import Cut, StopWindow
from tandem_engine.tokenizer.vocabulary import Vocabulary


class OutputText:
    """A stop string counts when it ends in a token after the first `min_tokens`, as EOS does."""

    __slots__ = ("_count", "_detokenizer", "_min_tokens", "_window", "characters")

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
        return self._window.push(piece, armed=self._count > self._min_tokens)

    def flush(self) -> Cut:
        """The rest, when the output ends without a stop string. An unfinished character may complete one."""
        cut = self._window.push(self._detokenizer.flush(), armed=self._count > self._min_tokens)
        return cut if cut.matched else Cut(cut.text + self._window.flush(), None)
