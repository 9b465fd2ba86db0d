"""What a stream lost, gained or garbled, against the same request answered without a fault.

Tokens are compared one by one where the stream carries them (logprobs were asked for), words otherwise. A
stream that ended in an error is failed; its output until then must still be a beginning of the right text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher

from tandem_testing.chaos.streams import Answer, ChoiceText

LOGPROB_TOLERANCE = 1e-3
"""Batches of another size add up in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Counts of what must be zero."""

    wrong: int = 0
    missing: int = 0
    doubled: int = 0
    failed: int = 0
    """Requests that ended in an error, or whose stream was no sound answer."""
    leaked: int = 0
    """KV pages that did not come back."""

    def __add__(self, other: "Damage") -> "Damage":
        return Damage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Damage)})

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(Damage))


def compare_sequences(expected: Sequence[str], got: Sequence[str]) -> Damage:
    """Tokens of `got` that are wrong, missing or there twice."""
    damage = Damage()
    if list(expected) == list(got):
        return damage
    for change, i1, i2, j1, j2 in SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if change == "delete":
            damage += Damage(missing=i2 - i1)
        elif change == "insert":
            size = j2 - j1
            again = got[j1:j2] in (got[j1 - size : j1] if j1 >= size else None, got[j2 : j2 + size])
            damage += Damage(doubled=size) if again else Damage(wrong=size)
        elif change == "replace":
            damage += Damage(wrong=max(i2 - i1, j2 - j1))
    return damage


def compare_choices(expected: ChoiceText, got: ChoiceText, *, whole: bool) -> Damage:
    """`whole` is False for a stream that broke off: then a beginning is all it can be."""
    right, mine = expected.units, got.units
    if not whole:
        right = right[: len(mine)]
    damage = compare_sequences(right, mine)
    if not damage and whole and (expected.text, expected.finishes) != (got.text, got.finishes):
        damage += Damage(wrong=1)
    pairs = zip(expected.logprobs, got.logprobs, strict=False)
    return damage + Damage(wrong=sum(abs(a - b) > LOGPROB_TOLERANCE for a, b in pairs if not damage))


def compare_answers(expected: Answer, got: Answer) -> Damage:
    """All choices of one request. `expected` is sound."""
    whole = got.error is None
    damage = Damage(failed=int(not whole))
    for index, choice in expected.choices.items():
        damage += compare_choices(choice, got.choices.get(index, ChoiceText()), whole=whole)
    if whole and got.usage.get("completion_tokens") != expected.usage.get("completion_tokens"):
        damage += Damage(wrong=1)
    return damage
