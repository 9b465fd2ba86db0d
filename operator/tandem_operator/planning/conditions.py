"""One condition of a status."""

from typing import Literal

from tandem_operator.api.types import Condition

MAX_MESSAGE = 4096


def condition(kind: str, status: bool | None, reason: str, message: str = "") -> Condition:
    """A condition of no time yet; None is "not known"."""
    word: Literal["True", "False", "Unknown"] = "Unknown" if status is None else "True" if status else "False"
    return Condition(type=kind, status=word, reason=reason, message=message[:MAX_MESSAGE])
