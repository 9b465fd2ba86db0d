"""Events that differ from those before in their text alone, as nearly all of a stream do."""

from collections.abc import Callable
from typing import NamedTuple

from tandem_services.gateway.answer_format import encode_json

_PLACE = "\0"


class _Around(NamedTuple):
    before: bytes
    after: bytes


class TextEvents:
    """Of one answer: what is around the text is encoded once for each choice."""

    __slots__ = ("_around", "_encode")

    def __init__(self, encode: Callable[[int, str], bytes]) -> None:
        """`encode` makes the event of a choice's text. Behind the text nothing is in it that clients have chosen."""
        self._encode = encode
        self._around: dict[int, _Around] = {}

    def of(self, choice: int, text: str) -> bytes:
        """The bytes that `encode` would make."""
        around = self._around.get(choice)
        if around is None:
            around = self._around[choice] = self._learn(choice)
        return around.before + encode_json(text) + around.after

    def _learn(self, choice: int) -> _Around:
        before, place, after = self._encode(choice, _PLACE).rpartition(encode_json(_PLACE))
        assert place, "the event does not have its text"
        return _Around(before, after)
