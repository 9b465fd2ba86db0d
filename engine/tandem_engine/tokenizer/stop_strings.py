"""Stop strings over a stream of text pieces.

Text that may yet become a stop string is held back, so that its beginning never reaches the client.
The result does not depend on how the text is cut into pieces: of all occurrences the one that ends first
wins, and of those that end together the longest. An early match inside a long
piece is not missed [stop-window].
"""

from typing import NamedTuple


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
