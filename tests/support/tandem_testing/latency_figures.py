"""Figures of latencies for tests of the planner: prompts of given lengths, and decode steps."""

from collections.abc import Sequence
from math import inf

from tandem_operator.scaling.distribution import Distribution
from tandem_operator.scaling.load import PromptFigures, StepFigures
from tandem_services.common.metrics import PROMPT_TOKENS


def distribution_of(values: Sequence[float], bounds: Sequence[float] = PROMPT_TOKENS) -> Distribution:
    """As a histogram of a gateway has these values."""
    counts = [0.0] * (len(bounds) + 1)
    for value in values:
        counts[sum(bound < value for bound in bounds)] += 1
    return Distribution.of((*bounds, inf), counts, sum(values))


def prompts_of(tokens: Sequence[float], arrived_tokens_per_s: float, **changes) -> PromptFigures:
    """Prompts of these lengths that come at random."""
    values = {"arrivals_variation": 1.0, "step_base_s": 0.0, **changes}
    return PromptFigures(tokens=distribution_of(tokens), arrived_tokens_per_s=arrived_tokens_per_s, **values)


def steps_of(**changes) -> StepFigures:
    """Steps of 10 ms, and 0.5 ms more for each sequence; 20 run on one worker, and 3 of 500 steps arrive per second."""
    values = {"base_s": 0.01, "sequence_s": 0.0005, "kv_token_s": 0.0, "context_tokens": 1000.0}
    return StepFigures(**{**values, "served_per_s": 20 / 0.02, "steps_each": 500.0, "arrived_per_s": 3.0, **changes})
