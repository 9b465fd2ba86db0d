"""Triton's language stays as its interpreter needs it, for a process that interprets kernels and does nothing else.

The interpreter replaces every function of the language when a kernel is launched, and again at each call of a function
within a kernel: it looks at a thousand members each time, which takes longer than what is called.
"""

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


class Kept:
    """In place of the interpreter's record of what it has to put back."""

    def restore(self) -> None:
        pass


def install() -> None:
    """Replace the functions once, for each set of modules by which kernels know the language."""
    patch = interpreter._patch_lang
    known: set[frozenset[int]] = set()

    def patched(fn: Callable[..., Any]) -> Kept:
        seen = frozenset(id(one) for one in fn.__globals__.values() if one is language or one is language.core)
        if seen not in known:
            patch(fn)
            known.add(seen)
        return Kept()

    interpreter._patch_lang = patched
