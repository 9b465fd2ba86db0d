"""`best_of`: more choices are generated than returned; the likeliest per token are kept, as OpenAI has it."""

from collections.abc import Sequence
from dataclasses import replace

from tandem_services.gateway.answer_format import WholeChoice


def keep_best(choices: Sequence[WholeChoice], *, generated: int, kept: int) -> list[WholeChoice]:
    """Of every `generated` choices in a row, those of one prompt, the `kept` best, best first and numbered anew."""
    if generated == kept:
        return list(choices)
    best: list[WholeChoice] = []
    for first in range(0, len(choices), generated):
        ranked = sorted(choices[first : first + generated], key=_mean_logprob, reverse=True)
        best += ranked[:kept]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


def _mean_logprob(choice: WholeChoice) -> float:
    scores = [token.logprob.logprob for token in choice.scored]
    return sum(scores) / len(scores) if scores else float("-inf")
