"""Speculative decoding: a cheap proposer drafts tokens, and the model verifies several of them at a time.

One step of a request whose newest completed token is at position n

    propose   a proposer drafts d tokens for positions n + 1 … n + d              scheduler thread, or queued by it
    compute   one forward of the tokens n … n + d, sampling after each of them     TARGET_VERIFY
    verify    drafts are accepted while they equal what was sampled at their position
    settle    the accepted run, 1 … d + 1 tokens, becomes output; KV after it is overwritten later

Ordinary decoding is the case d = 0, an accepted run of length one. A proposer cannot change which tokens a step yields,
only how many (see `verify`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem_engine.forward.batch import Chains, Guesses
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.sampling import SamplingParams

TokenIds = Callable[[int, int], Sequence[int]]
"""(start, stop) → settled tokens [start, stop) of prompt and output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRequest:
    """One request that may take drafts in the next step. Every token of it is settled."""

    kv: RequestKv
    """Row and pages: its identity until it gives them back."""
    seq_len: int
    """Settled tokens, prompt and output. The first draft is for position `seq_len`."""
    token_ids: TokenIds
    sampling: SamplingParams
    limit: int
    """Drafts that the step has room for, at least 1."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """What was proposed: a chain for each request, in their order; () for those without an idea.

    Lives in the plan of one step and nowhere else, so that no draft is ever taken for a token [drafts-in-plan].
    """

    chains: Chains = ()
    guesses: Guesses | None = None
    """Where the tokens are, if only the device has them: then `chains` are indices among these."""


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """How many of the tokens sampled for each sequence are its output."""

    accept_lens: tuple[int, ...]
    """[S], each from 1 to drafts + 1: accepted drafts and the bonus token sampled after them."""


class Proposer(Protocol):
    """Guesses tokens. Called by the scheduler thread only, while no step is in flight."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def writes_kv(self) -> bool:
        """Whether it computes on the pages of a request, which must then hold `seq_len + limit` tokens."""
        ...

    def ready(self, request: DraftRequest) -> bool:
        """Whether a proposal is likely enough to wait for the step in flight to settle.

        The one method that is called with a step in flight; tokens of that step are not in the request.
        """
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        """Up to `limit` tokens for each of `requests`, none of them twice in the list."""
        ...

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """`kv` is given back after this call: forget its row. `token_ids` are those its pages hold
        [row-state-forgotten]."""
        ...


class Verifier(Protocol):
    """Determines which drafts are accepted. Pure; called by the thread that runs forwards."""

    def verify(self, drafts: DraftTokens, sampled: Sequence[int]) -> AcceptResult:
        """Compare drafts with the model's choice.

        Args:
            drafts: a chain for each of the S sampling sequences.
            sampled: [R] one token for each position of each run, R = Σ (len(chain) + 1).
        """
        ...
