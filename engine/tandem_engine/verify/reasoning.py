"""Reasoning budgets of some requests of the matrix: on every path beside free ones.

The reference looks at its whole output before each token, in the plainest words there are for what a budget means.
"""

from collections.abc import Sequence

from tandem_engine.messages.reasoning import ReasoningBudget
from tandem_engine.sampling.grammar.reasoning import LEAD


def budgets_against(outputs: Sequence[int], vocab_size: int) -> tuple[ReasoningBudget, ...]:
    """Budgets that change an output which is `outputs` without: of a prompt that has opened the reasoning, and of a
    model that opens it by its first token."""
    begin, end = outputs[:1], (vocab_size - 1, vocab_size - 2)
    return (
        ReasoningBudget(tokens=5, begin=end, end=end, opened=True),
        ReasoningBudget(tokens=3, begin=tuple(begin), end=end[:1]),
    )


def forced_token(budget: ReasoningBudget, outputs: Sequence[int]) -> int | None:
    """The only token that may follow `outputs`, if there is one."""
    start = 0 if budget.opened else _behind(budget.begin, outputs[: LEAD - 1 + len(budget.begin)], 0)
    if start is None or _behind(budget.end, outputs, start) is not None or len(outputs) - start < budget.tokens:
        return None
    begun = max(n for n in range(len(budget.end)) if tuple(outputs[max(start, len(outputs) - n) :]) == budget.end[:n])
    return budget.end[begun]


def _behind(marker: Sequence[int], outputs: Sequence[int], start: int) -> int | None:
    """Where the first `marker` from `start` on ends."""
    places = range(start, len(outputs) - len(marker) + 1)
    return next((at + len(marker) for at in places if tuple(outputs[at : at + len(marker)]) == tuple(marker)), None)
