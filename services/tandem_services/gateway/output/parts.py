"""Parts of an output: reasoning, content and tool calls, in the order in which the model wrote them.

Readers and parsers emit parts as early as they can, so the boundary between two text parts has no meaning; `joined`
normalizes outputs for comparison.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call; `index` counts those of one output from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON that is the arguments of call `index`."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """Equal outputs, however they were cut: neighbours of one kind are one part."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        match last, part:
            case (Content(before), Content(text)):
                whole[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                whole[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                whole[-1] = CallArguments(index, before + text)
            case _:
                whole.append(part)
    return whole
