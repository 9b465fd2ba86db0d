"""A validated request: everything that was asked for, checked and in token ids. Nothing has been sent yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.output_reader import PLAIN, OutputReading
from tandem_services.gateway.session_turns import SessionTurn

EXPECTED_OUTPUT = 512
"""Few requests use all of a generous max_tokens: a tenant's token limit counts no more than this many output tokens
of a choice before they are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChoice:
    """One choice of the answer."""

    index: int
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    echo: str | None = None
    """Text that the answer begins with; None when the request does not echo its prompt. The text of a prompt can be
    empty, for example when it consists of special tokens alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan:
    """One request of a client."""

    model: str
    """What the client calls it: the answer says the same."""
    choices: tuple[PlannedChoice, ...]
    """Ordered by index: prompt by prompt, `n` choices each."""
    shows_logprobs: bool
    """False when logprobs are computed for `best_of` alone."""
    n: int
    """Choices generated for each prompt."""
    kept: int
    """Of these, the best that are returned: fewer than `n` with best_of."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stream_interval: int = 1
    """Tokens of a choice that are written together, after its first."""
    generate: bool = True
    """False (max_tokens 0): the prompt is computed and cached, and the answer is its echo or nothing."""
    cache_salt: str = ""
    priority: int = 0
    skip_special_tokens: bool = True
    keep_stop: bool = False
    prompt_logprobs: int | None = None
    """Alternatives that the client wants listed with each prompt token; None when it wants no such list."""
    tells_ids: bool = False
    """The ids of prompts and outputs are part of the answer."""
    names_by_id: bool = False
    """Logprobs call tokens by their ids."""
    reading: OutputReading = PLAIN
    """How the text of the outputs is read."""
    grammar_field: str | None = None
    """The request field that asked for a grammar: what errors about it name."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that its answer repeats, where the endpoint does so."""
    session_key: str = ""
    """The request's `user`, for routing by the policy `session`."""
    turn: SessionTurn | None = None
    """The session that its one choice continues."""

    @property
    def told_logprobs(self) -> int | None:
        """Most alternatives that the answer has with each token; None when it has no logprobs."""
        sampling = self.choices[0].sampling
        if not self.shows_logprobs or sampling.logprobs is None:
            return None
        return len(sampling.logprob_token_ids) or sampling.logprobs

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has; a session's with all that came before."""
        history = 0 if self.turn is None else self.turn.history
        return history + sum(len(choice.input_ids) for choice in self.choices[:: self.n])

    @property
    def expected_tokens(self) -> int:
        """What it is expected to use of its tenant's tokens."""
        return self.prompt_tokens + sum(min(choice.sampling.max_tokens, EXPECTED_OUTPUT) for choice in self.choices)

    def owned_by(self, caller: Caller) -> "GenerationPlan":
        """As it is carried out for `caller`: apart from what other tenants cache, no more important than it may be."""
        salt, priority = caller.cache_salt(self.cache_salt), caller.priority(self.priority)
        return replace(self, cache_salt=salt, priority=priority)
