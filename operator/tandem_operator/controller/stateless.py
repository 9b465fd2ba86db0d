"""kopf without a memory of its own: what handlers of changes would need is neither kept on objects nor worked out.

By default kopf copies each object that it hears of several times, to tell what has changed since handlers last
succeeded. Ours are told of events alone, and those copies were half of the operator's CPU time.
"""

from typing import Any

import kopf


class NoDifferences(kopf.DiffBaseStorage):
    """Every object is as it was."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is written to objects."""


class NoProgress(kopf.ProgressStorage):
    """No handler is ever under way."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is written to objects."""

    def purge(self, **_: Any) -> None:
        """Nothing was."""

    def touch(self, **_: Any) -> None:
        """Nobody waits."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
