"""A validated request: all parameters checked, all prompts in token ids. Nothing has been sent yet."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.base.logs import about_request
from tandem_engine.messages.requests import AdapterRef, PoolingParams, attempt_id
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.dispatch.progress import Progress
from tandem_services.gateway.dispatch.sessions import SessionTurn
from tandem_services.gateway.objectives import Objectives
from tandem_services.gateway.observe.tracing import UNTRACED, RequestTrace
from tandem_services.gateway.output.reader import PLAIN, OutputReading
from tandem_services.gateway.queueing.shared_route import SharedRoute
from tandem_services.router.tickets import RouteTicket

EXPECTED_OUTPUT = 512
"""Few requests use all of a generous max_tokens: a tenant's token limit counts no more than this many output tokens
of a choice before they are there."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChoice:
    """One choice of the answer."""

    index: int
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    echo: str | None = None
    """Text that the answer begins with; None when the request does not echo its prompt. The text of a prompt can be
    empty, for example when it consists of special tokens alone."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan:
    """One request of a client."""

    model: str
    """The model name that the client sent: the response repeats it."""
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
    session_key: str = ""
    """The request's `user`, for routing by the policy `session`."""
    turn: SessionTurn | None = None
    """The session that its one choice continues."""
    adapter: AdapterRef | None = None
    """What the model name stood for when the request came; None: the model alone."""

    @property
    def returned_logprobs(self) -> int | None:
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

    def computed_by(self, adapter: AdapterRef | None) -> "GenerationPlan":
        """The same with this adapter, in all attempts."""
        return self if adapter is None else replace(self, adapter=adapter)

    def owned_by(self, caller: Caller) -> "GenerationPlan":
        """As it is carried out for `caller`: apart from what other tenants cache, no more important than it may be."""
        salt, priority = caller.cache_salt(self.cache_salt), caller.priority(self.priority)
        if salt == self.cache_salt and priority == self.priority:
            return self
        return replace(self, cache_salt=salt, priority=priority)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a choice fights for its life."""

    max_attempts: int = 3
    """In a row, each with fewer than `PROOF_TOKENS` new tokens."""
    recovery_s: float = math.inf
    """A choice that has begun waits this long for a worker when there is none; in any case its deadline ends it."""
    silence_s: float = 10.0
    """Workers that say nothing at all, one after the other, have this long together [bounded-waits]."""
    poll_s: float = 0.1
    prefill_fallback: bool = True
    """Without prefill workers decode workers compute prompts, instead of failing them [decode-computes-prompts]."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceRequest:
    """One choice of one client request, ready to be sent."""

    request_id: str
    index: int
    model: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int
    adapter: AdapterRef | None = None
    """That computes it, in all attempts; None: the model alone."""
    session_key: str = ""
    """Whose request it is, for routing by the policy `session`."""
    pooling: PoolingParams | None = None
    """An embedding is wanted instead of text; `sampling` then allows one token."""
    group: str = ""
    """Name that all choices of the prompt share, "" when there is one."""
    route: SharedRoute | None = None
    """Where their first attempts go."""
    arrivals: asyncio.Semaphore | None = None
    """What its request's choices share: so many arrive in the queue at the same time. None: it is the only one."""
    ticket: RouteTicket = field(default_factory=RouteTicket)
    """Where the first attempt of all is to go, if a stand-alone router has chosen."""
    turn: SessionTurn | None = None
    """The session that it continues."""
    objectives: Objectives | None = None
    """None: it has none."""
    deadline: float
    """Monotonic time of the gateway's clock."""
    caller: Caller = field(default_factory=Caller)
    trace: RequestTrace = UNTRACED

    @property
    def about(self) -> dict[str, Any]:
        """Fields of log records about it."""
        return {**about_request(self.request_id, trace_id=self.trace.trace_id), "choice": self.index}

    def attempt_id(self, progress: Progress) -> str:
        """Of its current attempt."""
        return attempt_id(self.request_id, self.index, progress.number)
