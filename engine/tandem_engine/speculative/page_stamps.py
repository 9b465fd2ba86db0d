"""What a draft model's pages hold, page by page.

A page of draft KV is a function of the tokens up to its end, as a page of KV is. Its stamp is a hash of
these tokens, written when the page is: whoever finds the stamp of its own tokens on a page of its own may
use what is there, whichever request computed it and however the page came to it. A page that is filled by
somebody else (handed over by another worker, loaded from another tier) keeps the stamp of what the draft
model last wrote there, which is then the stamp of other tokens. So nobody has to say when pages change hands.

A collision costs some acceptance and no token.
"""

from collections.abc import Sequence

from tandem_engine.names import PageId

UNKNOWN = 0
EMPTY_TEXT = 1
"""Hash of the text before the first page."""


class PageStamps:
    """One stamp per page of the pool. Scheduler thread only."""

    def __init__(self, num_pages: int) -> None:
        self._stamps = [UNKNOWN] * num_pages

    def has(self, page: PageId, text: int) -> bool:
        """Whether `page` holds the tokens that hash to `text`."""
        return self._stamps[page] == text

    def write(self, page: PageId, text: int) -> None:
        """`page` holds the tokens that hash to `text`; `UNKNOWN` while it is being filled."""
        self._stamps[page] = text


def next_text(text: int, tokens: Sequence[int]) -> int:
    """Hash of a text with one more page of `tokens`."""
    return hash((text, *tokens)) or EMPTY_TEXT
