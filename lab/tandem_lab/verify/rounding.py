"""How far rounding in float32 moves the logprobs of a model, in transformers itself.

Few models make much of it: a recurrence that normalizes numbers close to zero multiplies it by thousands. Then an
output that differs from the reference may be as close to the truth as the reference is. So when first an output
differs, transformers computes the outputs of the reference in float64 as well, and what its own float32 is off by tells
how far logprobs may be apart. Where that is no more than for other models, the difference stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_engine.engine.stats import Generation
from tandem_engine.messages.requests import GenerateRequest
from tandem_lab.verify.compare import (
    LOGPROB_TOLERANCE,
    MOST_ROUNDING,
    Comparison,
    Score,
    compare_scored,
    logprob_bound,
)
from tandem_lab.verify.reference import ReferenceOutput


@dataclass(kw_only=True, slots=True)
class Rounding:
    """Measured once."""

    score: Score
    """Of transformers in float32."""
    exact: Callable[[], Score]
    """Loads transformers in float64."""
    references: Sequence[ReferenceOutput]
    measured: float = 0.0
    """How far logprobs may be apart, in nats; 0 until an output differs."""

    def compare(
        self,
        requests: Sequence[GenerateRequest],
        outputs: Sequence[Generation],
        references: Sequence[ReferenceOutput],
        *,
        otherwise: Comparison,
    ) -> Comparison:
        """Within what rounding explains; `otherwise` where that is no more than usual."""
        if not self.measured:
            bound = logprob_bound(self.exact(), self.score, self.references, least=LOGPROB_TOLERANCE)
            self.measured = min(MOST_ROUNDING, bound)
        if self.measured <= LOGPROB_TOLERANCE:
            return otherwise
        return compare_scored(requests, outputs, references, self.score, self.measured)
