"""What `LLM` and `AsyncLLM` need to know of an answer while the engine computes it."""

from typing import Protocol

from tandem_engine.messages.outputs import Finish, TokenOutput
from tandem_engine.messages.requests import GenerateRequest


class Pending(Protocol):
    """One prompt on its way through the engine. Belongs to one thread."""

    @property
    def request_id(self) -> str: ...

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        """What the engine is asked."""
        ...

    @property
    def finished(self) -> bool: ...

    @property
    def failure(self) -> Finish | None:
        """The first error that a request ended with."""
        ...

    def take(self, output: TokenOutput) -> None:
        """What one step brought for one of `requests`."""
        ...
