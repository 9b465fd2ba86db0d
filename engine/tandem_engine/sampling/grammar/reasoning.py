"""A reasoning budget as a grammar: it forces the end marker, and lets the answer follow the grammar of the request.

    waiting      the reasoning is not open; a begin marker among the first tokens opens it
    reasoning    any token, until the budget is spent: then only the missing part of the end marker is allowed
    answering    any token, or what the request's own grammar allows

The state of an output follows from its tokens alone, so a resumption or a handoff replays them like any grammar's, and
each position of a drafted run has its own mask. An end marker that the model has begun when the budget is spent is
completed, not restarted.

A token of `ReasoningBudget.ended_by` ends the reasoning, too, and is the first of the answer.

With a grammar for the answer, the output either begins with the begin marker or is the answer, and no EOS may come
before the answer does. Of the tokens that begin an answer, those are allowed with which the grammar may begin.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from tandem_engine.forward.batch import ALL_ALLOWED
from tandem_engine.messages.sampling import ReasoningBudget
from tandem_engine.sampling.grammar.backend import Bits, CompiledGrammar, Matcher

LEAD = 4
"""Tokens that may precede a begin marker: blanks. Behind more of them it is text of the answer."""

WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetedReasoning:
    """Implements `CompiledGrammar` for one request."""

    budget: ReasoningBudget
    words: int
    answer: CompiledGrammar | None = None
    """What the answer has to look like."""
    eos_token_ids: AbstractSet[int] = frozenset()

    @staticmethod
    def of(
        budget: ReasoningBudget, answer: CompiledGrammar | None, *, vocab_size: int, eos_token_ids: AbstractSet[int]
    ) -> "BudgetedReasoning":
        words = -(-vocab_size // WORD_BITS) if answer is None else answer.words
        return BudgetedReasoning(budget=budget, words=words, answer=answer, eos_token_ids=eos_token_ids)

    def matcher(self) -> Matcher:
        return ReasoningMatcher(self)


class ReasoningMatcher:
    """Implements `Matcher`."""

    __slots__ = ("_answer", "_answered", "_began", "_grammar", "_matched")

    def __init__(self, grammar: BudgetedReasoning) -> None:
        self._grammar = grammar
        self._answer = None if grammar.answer is None else grammar.answer.matcher()
        self._matched: list[int] = []
        """For each token before the answer, how much of the marker in question the output ends with."""
        self._began: int | None = 0 if grammar.budget.opened else None
        """How many of these tokens precede the reasoning; None while it has not been opened."""
        self._answered = 0
        """Tokens of the answer."""

    @property
    def ended(self) -> bool:
        return self._answer is not None and self._answers and self._answer.ended

    @property
    def problem(self) -> str | None:
        return None if self._answer is None else self._answer.problem

    def accept(self, tokens: Sequence[int]) -> int:
        taken = 0
        while taken < len(tokens) and not self._answers_with(tokens[taken]):
            if not self._fits(tokens[taken]):
                return taken
            self._continue_with(tokens[taken])
            taken += 1
        answer = tokens[taken:]
        answered = len(answer) if self._answer is None or not answer else self._answer.accept(answer)
        self._answered += answered
        return taken + answered

    def rollback(self, tokens: int) -> None:
        answered = min(tokens, self._answered)
        if self._answer is not None:
            self._answer.rollback(answered)
        self._answered -= answered
        del self._matched[len(self._matched) - (tokens - answered) :]
        if self._began is not None and len(self._matched) < self._began:
            self._began = None

    def fill(self, row: Bits) -> None:
        forced = self._forced
        if forced is not None:
            row[:] = 0
            _set(row, forced)
        elif self._answer is None:
            row[:] = ALL_ALLOWED
        elif self._answers:
            self._answer.fill(row)
        elif self._began is None:
            self._answer.fill(row)
            _set(row, self._grammar.budget.begin[0])
        else:
            row[:] = ALL_ALLOWED
            for token in self._grammar.eos_token_ids:
                _clear(row, token)
            self._keep_answers_of(row)

    def _keep_answers_of(self, row: Bits) -> None:
        """Of the tokens that end the reasoning, those that the grammar of the answer may begin with."""
        ended_by = self._grammar.budget.ended_by
        if not ended_by or self._answer is None:
            return
        begins = np.zeros_like(row)
        self._answer.fill(begins)
        for token in ended_by:
            if not _has(begins, token):
                _clear(row, token)

    @property
    def _answers(self) -> bool:
        """The reasoning is over, or will not come."""
        if self._answered:
            return True
        if self._began is not None:
            return self._progress == len(self._grammar.budget.end)
        return len(self._matched) - self._progress >= LEAD

    @property
    def _progress(self) -> int:
        """Tokens of the begin marker, or once that is complete of the end marker, that stand at the end."""
        return self._matched[-1] if len(self._matched) > (self._began or 0) else 0

    @property
    def _forced(self) -> int | None:
        """The only token that may come next, if there is one."""
        budget = self._grammar.budget
        if self._answers:
            return None
        if self._began is not None:
            spent = len(self._matched) - self._began
            return budget.end[self._progress] if spent >= budget.tokens else None
        return budget.begin[self._progress] if self._answer is not None and self._progress else None

    def _answers_with(self, token: int) -> bool:
        """Whether `token`, the next one, belongs to the answer."""
        if self._answers:
            return True
        if self._began is not None:
            return self._forced is None and token in self._grammar.budget.ended_by
        return self._answer is not None and not self._matched and token != self._grammar.budget.begin[0]

    def _fits(self, token: int) -> bool:
        """Of the next token before the answer."""
        forced = self._forced
        if forced is not None:
            return token == forced
        return self._answer is None or token not in self._grammar.eos_token_ids

    def _continue_with(self, token: int) -> None:
        budget = self._grammar.budget
        marker = budget.begin if self._began is None else budget.end
        self._matched.append(_advance(marker, self._progress, token))
        if self._began is None and self._matched[-1] == len(marker):
            self._began = len(self._matched)


def _advance(marker: Sequence[int], matched: int, token: int) -> int:
    """How many tokens of `marker` an output ends with that ended with `matched` of them, once `token` follows."""
    known = (*marker[:matched], token)
    return next(length for length in range(len(known), -1, -1) if known[len(known) - length :] == marker[:length])


def _set(row: Bits, token: int) -> None:
    row.view("uint32")[token // WORD_BITS] |= 1 << token % WORD_BITS


def _has(row: Bits, token: int) -> bool:
    return bool(int(row.view("uint32")[token // WORD_BITS]) >> token % WORD_BITS & 1)


def _clear(row: Bits, token: int) -> None:
    row.view("uint32")[token // WORD_BITS] &= ~(1 << token % WORD_BITS) & 0xFFFFFFFF
