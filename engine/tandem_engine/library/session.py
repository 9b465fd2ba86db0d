"""A conversation that the engine keeps, as a caller of the library holds it.

    with llm.open_session() as session:
        llm.generate("Once upon a time", params, session=session)
        llm.generate(" And then", params, session=session)      # only what is new

Life of a session
    1. opened     nothing is kept yet
    2. continued  each prompt given with it is appended to all prompts and outputs before
    3. lost       the engine forgot it (`session_ttl`, `max_sessions`): the next prompt raises `SessionLostError`
    4. closed     the engine lets go of its tokens and pages

A turn that is aborted or fails adds nothing: the next one continues where it began.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """Give it to `generate`, one prompt at a time. Open one with `open_session`."""

    id: str
    turns: int = field(default=0, init=False)
    """Prompts that were answered to their end."""
    tokens: int = field(default=0, init=False)
    """Of all their prompts and outputs."""
    forget: Callable[[str], None] = field(repr=False)
    """Tells the engine to let go of the session of this id."""

    def turn_ended(self, *, prompt: int, output: int) -> None:
        """A turn of `prompt` and `output` tokens is part of the conversation now."""
        self.turns += 1
        self.tokens += prompt + output

    def close(self) -> None:
        """Let the engine forget it. Idempotent."""
        self.forget(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
