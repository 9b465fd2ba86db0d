"""`truncate_prompt_tokens`: prompts that are cut instead of refused. Decided before any of them is encoded."""

from collections.abc import Callable
from typing import Protocol

from tandem_engine.logs import quoted
from tandem_engine.tokenizer.truncation import Truncation, TruncationSide
from tandem_services.common.errors import bad_request

FIELD = "truncate_prompt_tokens"


class Truncating(Protocol):
    """A request that may ask for it."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """Tokens that stay; -1 for as many as there is room for."""
        ...

    @property
    def truncation_side(self) -> TruncationSide | None: ...


def asked_truncation(
    request: Truncating, context_length: Callable[[], int], *, max_tokens: int = 0, side: TruncationSide = "left"
) -> Truncation | None:
    """None when prompts stay whole. `max_tokens`: of output, as the client asked; `side`: when it names none.
    `context_length` is not asked when there is nothing to cut.

    Raises `ApiError` 400 for a length that no prompt can have beside its output.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return None
    # Where the output alone is too long, the check of both says so.
    room = max(context_length() - max(max_tokens, 1), 1)
    if wanted != -1 and not 1 <= wanted <= room:
        raise bad_request(
            f"{FIELD} must be -1 (all there is room for) or between 1 and {room}, the context less the output, "
            f"got {quoted(wanted)}",
            FIELD,
        )
    return Truncation(room if wanted == -1 else wanted, request.truncation_side or side)
