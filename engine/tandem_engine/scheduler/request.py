"""One request inside the engine: immutable input, mutable progress.

Finishing has two phases. `to_finish` is a pending finish (an abort, a deadline) that any code on the scheduler thread
may record at any time. `finished` is a fact that only settlement or the release path sets. A pending finish never
releases a request whose step is in flight: settlement processes it first [abort-is-deferred] [abort-before-token].

Progress is counted in tokens:

    origin_input_ids | output_ids
    0 ───────────────┬──────────────▶ fill_ids = origin_input_ids + output_ids
                     └ prompt_len

KV ownership is in `kv` alone and is never derived from the length of `output_ids` [owned-by-cursor].

`GrammarProgress` is the position of a request in its grammar. The matcher has seen the first `followed` output tokens,
never the prompt. Settlement advances it with each run of new tokens. Before a mask is filled, it catches up with tokens
that came another way: those of a resumed attempt, and the first token of a handoff. Retraction changes nothing, since
output tokens stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.names import RequestId
from tandem_engine.memory.host.tier import SwappedKv
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace
from tandem_engine.messages.outputs import CacheHits, FetchReport, Finish, FinishReason, TokenLogprob, TransferReport
from tandem_engine.messages.requests import AdapterRef, Handoff, HandoffSide, PrefixFetch, TraceContext, about_attempt
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.grammar.backend import CompiledGrammar, Matcher
from tandem_engine.scheduler.prompt_results import PooledPrompt, PromptLogprobs
from tandem_engine.scheduler.stop import Cut, PlainEnd
from tandem_engine.speculative.adaptive_length import Acceptance

GRAMMAR_ENDED = Finish(reason=FinishReason.STOP, by_grammar=True)


def end_by_grammar(finish: Finish | None) -> Finish:
    """How an output ends whose newest token completes the grammar and ends it as `finish`, or not at all."""
    return finish if finish is not None and finish.reason is FinishReason.STOP else GRAMMAR_ENDED


@dataclass(kw_only=True, slots=True, eq=False)
class GrammarProgress:
    """Scheduler thread only."""

    compiled: CompiledGrammar
    matcher: Matcher
    followed: int = 0

    @classmethod
    def start(cls, compiled: CompiledGrammar) -> Self:
        """Nothing of the output seen so far."""
        return cls(compiled=compiled, matcher=compiled.matcher())

    def start_over(self, outputs: Sequence[int]) -> None:
        """Follow `outputs` with a new matcher: this one went along drafts into a state that it cannot leave."""
        self.matcher, self.followed = self.compiled.matcher(), 0
        self.catch_up(outputs)

    def catch_up(self, outputs: Sequence[int]) -> None:
        """Follow the settled `outputs` to their end. Raises `InvalidRequestError` when they break the grammar."""
        if self.followed == len(outputs):
            return
        self.followed += self.matcher.accept(outputs[self.followed :])
        if self.followed < len(outputs):
            raise InvalidRequestError(
                f"output token {self.followed} (id {outputs[self.followed]}) does not fit the grammar"
                if not self.matcher.ended
                else f"the grammar ends after {self.followed} output tokens, {len(outputs)} were given",
                param="resume_ids",
            )

    def cut(self, run: Sequence[int], cut: Cut) -> Cut:
        """Follow `run` as far as `cut` keeps it, and end the output where the grammar ends.

        A grammar that is satisfied and allows nothing more ends the output as `stop`, whatever `min_tokens` and
        `ignore_eos` say, and also at the last token that `max_tokens` allows. Raises `InvalidRequestError` for a
        token that does not fit, as the mask left none that other constraints of the request would allow, and for one
        that fits but leads to where the grammar is too large to be followed.
        """
        kept = self.matcher.accept(run[: cut.keep])
        self.followed += kept
        if self.matcher.ended:
            return Cut(keep=kept, finish=end_by_grammar(cut.finish if kept == cut.keep else None))
        if kept < cut.keep:
            if self.matcher.problem is not None:
                raise self.not_followed()
            raise InvalidRequestError(
                f"after {self.followed} output tokens no token satisfies both the grammar and the request's other "
                "constraints on tokens (min_tokens, bad_words, allowed_token_ids)",
                param="grammar",
            )
        return cut

    def not_followed(self) -> InvalidRequestError:
        """The end of a request whose matcher has a `problem`."""
        reason = f"the grammar cannot be followed after {self.followed} output tokens: {self.matcher.problem}"
        return InvalidRequestError(reason, param="grammar")


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class Request:
    """Compared by identity: two attempts with equal fields are different requests."""

    rid: RequestId
    origin_input_ids: tuple[int, ...]
    sampling: SamplingParams
    resumed: int = 0
    """Leading `output_ids` that the client already has; they are never streamed again."""
    handoff: Handoff | None = None
    fetch: PrefixFetch | None = None
    space: CacheSpace = BASE_SPACE
    """Where its prefix may be cached. The adapter in it, if any, computes prompt and output."""
    adapter: AdapterRef | None = None
    """What is known of that one."""
    priority: int = 0
    tenant: str = ""
    """Tenants get prompts computed in turns (see `queues`)."""
    turn: int = 0
    """Its place in the queue, in virtual tokens: `TenantOrder` sets it on arrival."""
    turn_end: int = 0
    """Where its prefill ends, in the same."""
    is_behind: bool = False
    """On arrival its tenant had fewer tokens computed than the others, by at least this prompt."""
    group: str = ""
    """Name shared by the choices of one answer, "" for a request of its own (see `groups`)."""
    session: str | None = None
    """The conversation that it is a turn of (see `sessions`)."""
    client: bytes = b""
    """Where outputs go: the identity of the gateway's socket, empty for an in-process caller."""
    deadline: float | None = None
    """Monotonic time."""
    arrived_at: float = 0.0
    trace: TraceContext | None = None

    output_ids: list[int] = field(default_factory=list)
    """Settled output tokens, resumed ones first."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per output token after the resumed ones, when requested."""
    prompt_logprobs: PromptLogprobs | None = None
    """Those computed so far, when requested and the prompt is computed here."""
    pooled: PooledPrompt | None = None
    """The part of the embedding computed so far, when one is requested."""
    kv: RequestKv | None = None
    """Row, pages and cursors while the request holds any."""
    swapped: SwappedKv | None = None
    """Its KV in host memory while it waits to come back; then `kv` is None."""
    extend_target: int = 0
    """Length of fill_ids that its prefill must reach before it may sample."""
    launched_len: int = 0
    """Tokens whose KV was matched or launched: the next step computes from here. 0 without `kv`."""
    recalled: RequestKv | None = None
    """The holding whose row has, on the device, the tokens that penalties and bad words need."""
    penalty_slot: int | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    """How well its drafts have fared. Survives retraction."""
    steps_in_flight: int = 0
    """Launched steps that have not settled [settle-before-retract]."""
    tokens_in_flight: int = 0
    """Output tokens that in-flight steps will add: at most, while drafts are being verified."""
    retractions: int = 0
    streamed: int = 0
    """Output tokens already sent, resumed ones included."""
    cached_tokens: int = 0
    """Prompt tokens that the first prefill found in the prefix cache."""
    cache_hits: CacheHits | None = None
    """Where those were. None until then; for a request that was handed over, as its sender reported."""
    transfer: TransferReport | None = None
    """What was brought here for it; of a request that was handed over, what was sent."""
    transferred_at: float | None = None
    """When that was done."""
    fetched: FetchReport | None = None
    grammar: GrammarProgress | None = None
    """Set once the grammar it requires is compiled, before its first token can be sampled."""
    awaits_adapter: bool = False
    """Its adapter is not in memory: see `scheduler.gates.adapters`."""
    adapter_awaited_at: float = 0.0
    """Since when, or since when the last time."""
    adapter_wait_s: float = 0.0
    """Time that it has waited for its adapter, all waits that have ended together."""
    first_scheduled_at: float | None = None
    delayed_since: float | None = None
    """When the last plan left it in the queue for the scheduling delay (`scheduler.policies`)."""
    delayed_s: float = 0.0
    """Time that it has waited for that."""
    first_token_at: float | None = None
    reported: bool = False
    """Its end is in the `EndedLog`."""

    plain_end: PlainEnd | None = None
    """Set with the first token when nothing needs to be known of later ones but whether they end the output:
    settlement may then go the short way."""

    to_finish: Finish | None = None
    finished: Finish | None = None

    @property
    def about(self) -> dict[str, Any]:
        """Fields of log records about it."""
        return about_attempt(self.rid, self.trace)

    @property
    def awaits_grammar(self) -> bool:
        """Whether it cannot sample yet because its grammar is being compiled."""
        return self.grammar is None and self.sampling.grammar is not None

    @property
    def held_up(self) -> bool:
        """Whether it cannot be computed yet, for want of its grammar or its adapter."""
        return self.awaits_adapter or self.awaits_grammar

    @property
    def prompt_len(self) -> int:
        return len(self.origin_input_ids)

    @property
    def fill_ids(self) -> list[int]:
        """Prompt and settled output: what a (re)computation must cover. O(length): never per decode step."""
        return [*self.origin_input_ids, *self.output_ids]

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """Settled tokens [start, stop) of `fill_ids`, without building all of it."""
        prompt = self.origin_input_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        outputs = self.output_ids[max(0, start - len(prompt)) : stop - len(prompt)]
        return [*prompt[start:], *outputs]

    @property
    def held_kv(self) -> RequestKv:
        """`kv` of a request that must have some."""
        assert self.kv is not None, f"request {self.rid} holds no KV"
        return self.kv

    @property
    def has_begun(self) -> bool:
        """Whether some of its result exists: KV, output, or results of its prompt."""
        asked = (self.prompt_logprobs, self.pooled)
        return self.kv is not None or bool(self.output_ids) or any(part is not None and part.begun for part in asked)

    @property
    def seq_len(self) -> int:
        """Settled tokens, prompt and output."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def longest_match(self) -> int:
        """Tokens that may come from the prefix cache: one at least is computed [logprobs-past-cache]."""
        longest = self.seq_len - 1
        for wanted in (self.prompt_logprobs, self.pooled):
            allowed = None if wanted is None else wanted.longest_match
            longest = longest if allowed is None else min(longest, allowed)
        return longest

    @property
    def remaining_tokens(self) -> int:
        """Output tokens still allowed, those in flight counted as spent."""
        return self.sampling.max_tokens - len(self.output_ids) - self.tokens_in_flight

    @property
    def may_decode(self) -> bool:
        """Whether one more token may be computed while it runs."""
        return self.to_finish is None and self.sampling.max_tokens > len(self.output_ids) + self.tokens_in_flight


def sends_kv(req: Request) -> bool:
    """Whether its KV goes to another worker, from where its pages are now."""
    return req.handoff is not None and req.handoff.side is HandoffSide.SEND


def hands_over_session(req: Request) -> bool:
    """Whether the receiver of its KV keeps a session, and ends an output that its grammar ends with the first token."""
    return sends_kv(req) and req.handoff is not None and req.handoff.keeps_session
