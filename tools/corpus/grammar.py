"""Template expansion: `[this|that]` picks one wording, `{slot}` reads a binding or draws from a word list.

A slot with a capital first letter (`{Hero}`) gives the value of the lower-case slot with its first
letter raised. A drawn slot stays bound for the rest of the text, so that a story keeps its places.
`{a:thing}` puts the indefinite article in front of the value.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

CHOICE = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(a:|A:)?([A-Za-z_]+?)(\d*)\}")


class UnknownSlotError(KeyError):
    """A template names a slot that is neither bound nor the name of a word list."""


def with_article(noun: str) -> str:
    """'owl' -> 'an owl'. Good enough for the words we list; none begins with a silent h."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def raise_first(text: str) -> str:
    """Capitalise the first letter only; `str.capitalize` would lower the rest."""
    return text[:1].upper() + text[1:]


@dataclass(kw_only=True, slots=True)
class Writer:
    """Expands templates for one document; its bindings are the document's memory."""

    rng: Random
    lists: Mapping[str, Sequence[str]]
    bound: dict[str, str] = field(default_factory=dict)

    def write(self, template: str) -> str:
        """Choices first, innermost outwards, so that slots in wordings not taken are never drawn."""
        while CHOICE.search(template):
            template = CHOICE.sub(self._choose, template)
        return SLOT.sub(self._fill, template)

    def one_of(self, templates: Sequence[str]) -> str:
        """Expand one of the templates."""
        return self.write(self.rng.choice(templates))

    def _choose(self, match: re.Match[str]) -> str:
        return self.rng.choice(match.group(1).split("|"))

    def _fill(self, match: re.Match[str]) -> str:
        article, name, index = match.groups()
        value = self._value(name, index)
        if article is None:
            return value
        phrase = with_article(value)
        return raise_first(phrase) if article == "A:" else phrase

    def _value(self, name: str, index: str) -> str:
        if name + index in self.bound:
            return self.bound[name + index]
        lower = name[0].lower() + name[1:]
        value = self._draw(lower, index)
        return raise_first(value) if name != lower else value

    def _draw(self, name: str, index: str) -> str:
        key = name + index
        if key not in self.bound:
            if name not in self.lists:
                raise UnknownSlotError(key)
            taken = set(self.bound.values())
            free = [word for word in self.lists[name] if word not in taken]
            self.bound[key] = self.rng.choice(free or list(self.lists[name]))
        return self.bound[key]
