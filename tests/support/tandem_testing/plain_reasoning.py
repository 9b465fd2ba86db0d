"""What a reasoning budget allows, the plain way: from the whole output, before each token."""

from collections.abc import Callable, Collection, Sequence

from tandem_engine.messages.sampling import ReasoningBudget
from tandem_engine.sampling.grammar.reasoning import LEAD
from tandem_lab.verify.reference import forced_token

Rule = Callable[[Sequence[int]], Collection[int]]
"""Tokens that a grammar allows after some of the answer."""


def allowed_after(
    budget: ReasoningBudget | None, outputs: Sequence[int], rule: Rule | None, *, vocab_size: int, eos: int
) -> set[int]:
    """Tokens that may follow `outputs`: in the answer those of `rule`, None for all."""
    free = {*range(vocab_size)}
    answer = answer_of(budget, outputs, constrained=rule is not None)
    if answer is not None:
        allowed = free if rule is None else {*rule(answer)}
        return {*allowed, budget.begin[0]} if _may_begin(budget, outputs, rule) else allowed
    assert budget is not None
    forced = forced_token(budget, outputs)
    if forced is not None:
        return {forced}
    if rule is not None and not budget.opened and len(outputs) < len(budget.begin):
        return {budget.begin[len(outputs)]}
    return free if rule is None else free - {eos}


def answer_of(budget: ReasoningBudget | None, outputs: Sequence[int], *, constrained: bool) -> list[int] | None:
    """The tokens behind the reasoning; None while it may yet continue, and all when there is none."""
    if budget is None:
        return [*outputs]
    start = 0 if budget.opened else _find(budget.begin, outputs, range(1 if constrained else LEAD))
    if start is None:
        partial = constrained and tuple(outputs) == budget.begin[: len(outputs)]
        return None if partial and outputs else [*outputs]
    end = _find(budget.end, outputs, range(start, len(outputs)))
    return None if end is None else [*outputs[end:]]


def _may_begin(budget: ReasoningBudget | None, outputs: Sequence[int], rule: Rule | None) -> bool:
    return budget is not None and rule is not None and not budget.opened and not outputs


def _find(marker: tuple[int, ...], outputs: Sequence[int], places: range) -> int | None:
    """Behind the first `marker` that begins at one of `places`."""
    return next((at + len(marker) for at in places if tuple(outputs[at : at + len(marker)]) == marker), None)
