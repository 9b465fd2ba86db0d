"""How far one model's predictions of a text are from another's, token by token.

perplexity        e^(mean −log q(t))                          t the token that follows
KL divergence     Σ_v p(v) · (log p(v) − log q(v))            p the baseline's distribution, q the other's; in nats
top-1 agreement   share of places where both think the same token likeliest
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Divergence:
    """Sums over the places that were added so far."""

    places: int = 0
    surprise: float = 0.0
    kl: float = 0.0
    largest_kl: float = 0.0
    agreed: int = 0

    def add(self, baseline: Tensor, logits: Tensor, targets: Tensor) -> None:
        """A few more places.

        Args:
            baseline: float32 [n, vocab], log p.
            logits: float32 [n, vocab], of q.
            targets: int64 [n].
        """
        logprobs = logits.log_softmax(dim=-1)
        # A token that p excludes adds nothing, however unlikely q thinks it.
        terms = (baseline.double().exp() * (baseline - logprobs).double()).masked_fill(baseline.isneginf(), 0.0)
        kl = terms.sum(dim=-1).clamp(min=0.0)
        self.places += len(targets)
        self.surprise -= float(logprobs.gather(1, targets[:, None]).double().sum())
        self.kl += float(kl.sum())
        self.largest_kl = max(self.largest_kl, float(kl.max()))
        self.agreed += int((logprobs.argmax(dim=-1) == baseline.argmax(dim=-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.places)

    @property
    def mean_kl(self) -> float:
        return self.kl / self.places

    @property
    def agreement(self) -> float:
        return self.agreed / self.places


def kept(logits: Tensor) -> Tensor:
    """What `Divergence.add` wants of a baseline's logits."""
    return torch.log_softmax(logits, dim=-1)
