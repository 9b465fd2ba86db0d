"""How far rounding in float32 moves the logprobs of a model, in transformers itself.

Few models make much of it: a recurrence that normalizes numbers close to zero multiplies it by thousands. Then an
output that differs from the reference may be as close to the truth as the reference is. So when first an output
differs, transformers computes the outputs of the reference in float64 as well, and what its own float32 is off by tells
how far logprobs may be apart. Where that is no more than for other models, the difference stands.

A difference of tokens that a rule has chosen (edits of logits, a grammar, a budget) always stands, since a score does
not tell whether the rule was followed. So does an output that ends elsewhere although its tokens are the reference's.

Norms of transformers compute in float32 whatever the dtype. The error is that of the other operations, carried through
them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem_engine.engine.stats import Generation
from tandem_engine.messages.requests import GenerateRequest
from tandem_lab.verify.compare import (
    LOGPROB_TOLERANCE,
    MAX_ROUNDING,
    Comparison,
    Score,
    compare_scored,
    logprob_bound,
    token_difference,
)
from tandem_lab.verify.reference import ReferenceOutput

logger = logging.getLogger(__name__)


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
            # Logged before: the weights in float64 may be more than there is memory for.
            logger.warning("%s; whether this is rounding is measured in float64", otherwise.difference)
            bound = logprob_bound(self.exact(), self.score, self.references, least=LOGPROB_TOLERANCE)
            self.measured = min(MAX_ROUNDING, bound)
        if self.measured <= LOGPROB_TOLERANCE:
            return otherwise
        found = compare_scored(requests, outputs, references, self.score, self.measured)
        if found.difference is not None:
            return found
        triples = zip(requests, outputs, references, strict=True)
        wrong = next(filter(None, (_no_rounding(*each) for each in triples)), None)
        return found if wrong is None else replace(found, difference=wrong)


def _no_rounding(request: GenerateRequest, output: Generation, reference: ReferenceOutput) -> str | None:
    """A difference of tokens within the bound that rounding does not explain."""
    tokens = (*request.resume_ids, *output.token_ids)
    other = any(mine != theirs for mine, theirs in zip(tokens, reference.token_ids, strict=False))
    chosen_freely = reference.edits is None and not request.sampling.masked
    if tokens == reference.token_ids or (other and chosen_freely):
        return None
    return token_difference(request, tokens, reference, output)
