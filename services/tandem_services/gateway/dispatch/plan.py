"""A validated request: all parameters checked, all prompts in token ids. Nothing has been sent yet.

    Choice           one output of one prompt
    RequestPlan      choices, and what they share: all that decides what workers compute
    GenerationPlan   a `RequestPlan`, and how its answer is written

What of it runs, and how far that has come, is in `choice_run`.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Self

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.messages.requests import AdapterRef, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.dispatch.sessions import SessionTurn
from tandem_services.gateway.output.reader import PLAIN, OutputReading

EXPECTED_OUTPUT = 512
"""Few requests use all of a generous max_tokens: a tenant's token limit counts no more than this many output tokens
of a choice before they are there."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One choice of the answer."""

    index: int
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    """Of a prompt that is embedded it allows one token."""
    echo: str | None = None
    """Text that the answer begins with; None when the request does not echo its prompt. The text of a prompt can be
    empty, for example when it consists of special tokens alone."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """One request of a client, as far as workers compute it."""

    model: str
    """The model name that the client sent: the response repeats it."""
    choices: tuple[Choice, ...]
    """Ordered by index: prompt by prompt, `n` choices each."""
    n: int = 1
    """Choices generated for each prompt."""
    cache_salt: str = ""
    priority: int = 0
    session_key: str = ""
    """Whose request it is, for routing by the policy `session`."""
    turn: SessionTurn | None = None
    """The session that its one choice continues."""
    adapter: AdapterRef | None = None
    """What the model name stood for when the request came; it computes all attempts. None: the model alone."""
    pooling: PoolingParams | None = None
    """Embeddings are wanted instead of text."""

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has; a session's with all that came before."""
        history = 0 if self.turn is None else self.turn.history
        return history + sum(len(choice.input_ids) for choice in self.choices[:: self.n])

    def computed_by(self, adapter: AdapterRef | None) -> Self:
        """The same with this adapter."""
        return self if adapter is None else replace(self, adapter=adapter)

    def owned_by(self, caller: Caller) -> Self:
        """As it is carried out for `caller`: apart from what other tenants cache, no more important than it may be."""
        salt, priority = caller.cache_salt(self.cache_salt), caller.priority(self.priority)
        if salt == self.cache_salt and priority == self.priority:
            return self
        return replace(self, cache_salt=salt, priority=priority)


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan(RequestPlan):
    """With how its answer is written."""

    shows_logprobs: bool
    """False when logprobs are computed for `best_of` alone."""
    kept: int
    """Of the choices of a prompt, the best that are returned: fewer than `n` with best_of."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stream_interval: int = 1
    """Tokens of a choice that are written together, after its first."""
    generate: bool = True
    """False (max_tokens 0): the prompt is computed and cached, and the answer is its echo or nothing."""
    skip_special_tokens: bool = True
    keep_stop: bool = False
    prompt_logprobs: int | None = None
    """Number of alternatives to list with each prompt token; None without such a list."""
    returns_ids: bool = False
    """The ids of prompts and outputs are part of the answer."""
    names_by_id: bool = False
    """Logprobs call tokens by their ids."""
    reading: OutputReading = PLAIN
    """How the text of the outputs is read."""
    grammar_field: str | None = None
    """The request field of the grammar, named in errors about it."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that its answer repeats, where the endpoint does so."""

    @property
    def returned_logprobs(self) -> int | None:
        """Most alternatives that the answer has with each token; None when it has no logprobs."""
        sampling = self.choices[0].sampling
        if not self.shows_logprobs or sampling.logprobs is None:
            return None
        return len(sampling.logprob_token_ids) or sampling.logprobs

    @property
    def expected_tokens(self) -> int:
        """What it is expected to use of its tenant's tokens."""
        return self.prompt_tokens + sum(min(choice.sampling.max_tokens, EXPECTED_OUTPUT) for choice in self.choices)
