"""Dataclasses that only the type checker keeps from changing.

A frozen dataclass sets each field by a call, so that making one takes twice as long. What is made for each request uses
`checked_dataclass(frozen=True, ...)`: mypy refuses assignments, and nothing is checked when it runs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["checked_dataclass"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as checked_dataclass
else:
    from dataclasses import dataclass

    def checked_dataclass(*, frozen: bool, kw_only: bool = False, slots: bool = True) -> Callable[[type[T]], type[T]]:
        """As `dataclass`; instances have a hash as frozen ones do."""
        assert frozen, "others are ordinary dataclasses"
        return dataclass(kw_only=kw_only, slots=slots, unsafe_hash=True)
