"""Raises an exception in a function of a package that runs, once, through the interpreter's profile hook.

    with recorded(folder) as seen:          # every function that runs
        …
    for place in seen:
        with raising(place) as fault:       # its next call raises `Planted`
            …
        fault.fell                          # whether it was called

Only the current thread is watched. Each resumption of a coroutine counts as a call.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Planted(Exception):  # noqa: N818  # not an error of any code
    """What a function raises that has none."""


@dataclass(kw_only=True)
class Fault:
    """One planted exception."""

    code: CodeType
    skip: int = 0
    """Calls that pass before."""
    fell: bool = False


@dataclass
class Seen:
    """Functions that ran, in the order of their first calls, with the number of calls."""

    calls: dict[CodeType, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[CodeType]:
        return iter(self.calls)


@contextmanager
def recorded(*folders: Path) -> Iterator[Seen]:
    """Functions of modules below `folders` that run within the block."""
    prefixes, seen = tuple(f"{folder}/" for folder in folders), Seen()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefixes):
            seen.calls[code] = seen.calls.get(code, 0) + 1

    with _profile(on_event):
        yield seen


@contextmanager
def raising(fault: Fault) -> Iterator[Fault]:
    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is fault.code and event == "call" and not fault.fell:
            if fault.skip:
                fault.skip -= 1
                return
            fault.fell = True
            # The interpreter takes the hook away by itself when it raises.
            raise Planted(name_of(fault.code))

    with _profile(on_event):
        yield fault


def name_of(code: CodeType) -> str:
    """Module and qualified name."""
    return f"{Path(code.co_filename).stem}:{code.co_qualname}"


@contextmanager
def _profile(on_event: Any) -> Iterator[None]:
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)
