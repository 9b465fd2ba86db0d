"""How long an output may reason. Checked at the gateway and again by the engine."""

import msgspec

from tandem_engine.errors import InvalidRequestError

FIELD = "thinking_token_budget"
"""What clients call it."""
MAX_MARKER_TOKENS = 16
MAX_BUDGET = 2**31 - 1


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """After `tokens` tokens of reasoning the rest of the end marker is forced, and the answer follows."""

    tokens: int
    """Those of the end marker are not among them, nor is a begin marker that the model writes itself."""
    begin: tuple[int, ...]
    """Token ids of the marker by which an output begins to reason."""
    end: tuple[int, ...]
    """Token ids of the marker behind the reasoning."""
    opened: bool = False
    """The prompt ends inside the reasoning."""

    def check(self, *, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the limit and the value seen."""
        if not 0 <= self.tokens <= MAX_BUDGET:
            raise InvalidRequestError(f"{FIELD} must be between 0 and {MAX_BUDGET}, got {self.tokens}", param=FIELD)
        for name, marker in (("begin", self.begin), ("end", self.end)):
            if not 1 <= len(marker) <= MAX_MARKER_TOKENS:
                raise InvalidRequestError(
                    f"{FIELD}: the {name} marker must have 1 to {MAX_MARKER_TOKENS} tokens, it has {len(marker)}",
                    param=FIELD,
                )
            if not 0 <= min(marker) <= max(marker) < vocab_size:
                raise InvalidRequestError(
                    f"{FIELD}: the {name} marker has a token id outside 0 to {vocab_size - 1}", param=FIELD
                )
