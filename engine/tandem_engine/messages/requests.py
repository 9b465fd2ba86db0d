"""Messages from gateways to an engine.

A client request becomes one `GenerateRequest` per choice and attempt. Its `rid` names exactly that attempt, so a late
reply of an abandoned attempt cannot be mistaken for the current one. When two workers share the work, both get the same
request with the two ends of one `Handoff`.

`TraceContext` is the place of an attempt in its request's trace:

    client ─ traceparent ─▶ gateway ─ TraceContext in each GenerateRequest ─▶ engine ─ EndedRequest ─▶ worker service

The engine uses no tracing library: it keeps the context for its log and for its report.
"""

import re
from enum import StrEnum
from math import inf
from typing import Any

import msgspec

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.logs import about_request
from tandem_engine.base.release import UNSTATED
from tandem_engine.messages.kv_events import CacheSpace
from tandem_engine.messages.sampling import SamplingParams


class Pooling(StrEnum):
    """Which tokens' hidden states, after the final norm, become the embedding."""

    LAST = "last"
    """The last token's, which alone has seen the whole prompt."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLS = "cls"
    """The first token's. In a causal model it has seen nothing else."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One embedding. Dimensions are cut before the vector is normalized, as Matryoshka models are trained for."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    """Scale to length 1."""
    dimensions: int | None = None
    """Leading entries to keep; None for all."""

    def check(self, *, hidden_size: int) -> None:
        """Raise `InvalidRequestError` for what a model of `hidden_size` cannot give; 0 is one that gives none."""
        if not hidden_size:
            raise InvalidRequestError("this engine's model has no hidden states to pool", param="pooling")
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {hidden_size}, the size of this model's embeddings, "
                f"got {self.dimensions}",
                param="dimensions",
            )


MAX_TRACESTATE_CHARACTERS = 512
"""What W3C Trace Context requires every service to propagate."""

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(rf"[\x20-\x7e]{{0,{MAX_TRACESTATE_CHARACTERS}}}")


class TraceContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The span that the work is part of, in the form of W3C Trace Context."""

    traceparent: str
    """00-TRACE-SPAN-FLAGS in hexadecimal."""
    tracestate: str = ""
    """What tracing systems add for themselves; handed on as it came."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for what W3C Trace Context does not allow."""
        if not _TRACEPARENT.fullmatch(self.traceparent):
            raise InvalidRequestError("trace.traceparent is not 00-TRACE-SPAN-FLAGS in hexadecimal", param="trace")
        if not _TRACESTATE.fullmatch(self.tracestate):
            raise InvalidRequestError(
                f"trace.tracestate may have at most {MAX_TRACESTATE_CHARACTERS} printable ASCII characters",
                param="trace",
            )

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return self.traceparent[36:52]

    @property
    def sampled(self) -> bool:
        """Whether spans of this trace are wanted. False for a context that `check` refuses."""
        return self.valid and bool(int(self.traceparent[53:], 16) & 1)

    @property
    def valid(self) -> bool:
        """Whether `check` would let it pass."""
        return bool(_TRACEPARENT.fullmatch(self.traceparent) and _TRACESTATE.fullmatch(self.tracestate))


MAX_ROOM_BYTES = 256
MAX_GROUP_BYTES = 256
MAX_SESSION_BYTES = 256
MAX_TENANT_BYTES = 256

MAX_GENERATION = 2**53
"""Room and generation travel in every message about a transfer."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where another engine is. Everything is addressed to an incarnation, never to a bare address."""

    worker_id: str
    incarnation: str
    """`worker_id@number`, also the NIXL agent name."""
    endpoint: str
    """ZMQ endpoint of the engine's peer socket, e.g. tcp://10.0.0.7:5601."""
    compat_hash: str
    """Workers with different hashes hold KV in different shapes and are never paired."""
    release: int = UNSTATED
    """`base.release.RELEASE` of the engine."""


class HandoffSide(StrEnum):
    SEND = "send"
    """Compute the prompt, sample the first token, push KV to `peer`."""
    RECEIVE = "receive"
    """Grant pages to `peer`, wait for the KV, continue from the second token."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One end of a transfer: prefill → decode, or from a decode worker that is left to another."""

    side: HandoffSide
    room: str
    generation: int
    """Grows with each attempt in the same room, so that a message of an old attempt is recognized."""
    peer: Peer
    moving: bool = False
    """Of the side SEND: this worker was generating the output until the abort just before this message, and has its KV.
    It takes the request though it is draining."""
    keeps_session: bool = False
    """Of the side SEND: `peer` keeps a session, for which it has to get the KV. A grammar that ends with the first
    token therefore ends the output there and not here."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for a room or generation that no transfer could be named by."""
        if not 1 <= len(self.room.encode("utf-8", "surrogatepass")) <= MAX_ROOM_BYTES:
            raise InvalidRequestError(f"a handoff's room must have 1 to {MAX_ROOM_BYTES} bytes", param="handoff")
        if not 0 <= self.generation <= MAX_GENERATION:
            raise InvalidRequestError(
                f"a handoff's generation must be between 0 and {MAX_GENERATION}, got {self.generation}",
                param="handoff",
            )


class PrefixFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefix of the prompt is cached that is cheaper to bring here than to compute."""

    peer: Peer
    tokens: int
    """That many are worth asking for."""
    within_s: float
    """Later than this it is of no use."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for a fetch that makes no sense."""
        if self.tokens < 1:
            raise InvalidRequestError(f"fetch.tokens must be at least 1, got {self.tokens}", param="fetch")
        if not 0.0 < self.within_s < inf:
            raise InvalidRequestError(
                f"fetch.within_s must be a positive number of seconds, got {self.within_s}", param="fetch"
            )


class SessionRef(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that the engine keeps, so that a turn brings only its new tokens.

    It lives on one engine. Its first turn may come with the receiving end of a handoff; that engine then keeps it.
    """

    id: str
    turn: int | None = 0
    """Turns before this one. 0 begins the session, or restarts it. Any other number must be the engine's own
    count, so that a turn that is sent twice is refused instead of misread. None continues after whatever there is."""
    keeps_output: bool = True
    """False: the turn adds its prompt to the conversation and nothing of its output (`max_tokens` 0 of a client)."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for a name or a count that no session can have."""
        if not 1 <= len(self.id.encode("utf-8", "surrogatepass")) <= MAX_SESSION_BYTES:
            raise InvalidRequestError(f"a session id must have 1 to {MAX_SESSION_BYTES} bytes", param="session")
        if self.turn is not None and self.turn < 0:
            raise InvalidRequestError(f"a session's turn must be at least 0, got {self.turn}", param="session")


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """What the name of an adapter stood for when its request was made."""

    name: str
    """For messages."""
    digest: bytes
    """Of its content, `DIGEST_BYTES` long: what it is identified by."""
    source: str = ""
    """Folder, in the `--lora-dir` of workers, from which a worker without it may load it; "" if none is registered."""
    size: int = 0
    """Bytes of its tensors; 0 if not known."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Generate tokens after `input_ids + resume_ids`."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    resume_ids: tuple[int, ...] = ()
    """Output tokens the client already has. They count as output (max_tokens, sampling positions)."""
    handoff: Handoff | None = None
    fetch: PrefixFetch | None = None
    """For the worker that computes the prompt; a hint, which changes no token."""
    cache_salt: str = ""
    """Prefix cache entries are shared only among equal salts."""
    adapter: AdapterRef | None = None
    """The adapter that computes prompt and output; None for the base model alone."""
    priority: int = 0
    tenant: str = ""
    """Whose request it is. Prompts of several tenants are computed in turns; the name has no other meaning here."""
    group: str = ""
    """Requests with one prompt and one group name are choices of one answer (n, best_of): the prompt is computed
    once and its pages are shared. Each has an end of its own."""
    pooling: PoolingParams | None = None
    """Answer with an embedding of the prompt. `sampling` then says max_tokens 1, and the token means nothing."""
    session: SessionRef | None = None
    """The conversation that `input_ids` continue; None for a request of its own."""
    deadline_s: float | None = None
    """Seconds from receipt after which the request is aborted."""
    trace: TraceContext | None = None
    """The span of this attempt, whether it is sampled or not; None without tracing."""
    release: int = UNSTATED
    """`base.release.RELEASE` of the gateway. Engines refuse the requests of one outside their window."""


def space_of(message: GenerateRequest) -> CacheSpace:
    """Where the prefix of `message` may be cached."""
    return CacheSpace(message.cache_salt, b"" if message.adapter is None else message.adapter.digest)


_ATTEMPT = re.compile(r"(.+)-\d+-\d+", re.DOTALL)


def attempt_id(request_id: str, choice: int, attempt: int) -> str:
    """The `rid` of one attempt at one choice of a client's request."""
    return f"{request_id}-{choice}-{attempt}"


def request_id_of(rid: str) -> str:
    """The client request that an attempt is of; of an id that was made in another way, the id itself."""
    match = _ATTEMPT.fullmatch(rid)
    return rid if match is None else match[1]


def about_attempt(rid: str, trace: TraceContext | None = None) -> dict[str, Any]:
    """Fields of log records about it."""
    trace_id = trace.trace_id if trace is not None and trace.valid else None
    return about_request(request_id_of(rid), rid=rid, trace_id=trace_id)


def check_group(name: str) -> None:
    """Raise `InvalidRequestError` for a group name that is too long to be kept."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > MAX_GROUP_BYTES:
        raise InvalidRequestError(f"group may have at most {MAX_GROUP_BYTES} bytes, got {size}", param="group")


def check_tenant(name: str) -> None:
    """Raise `InvalidRequestError` for a tenant name that is too long to be kept."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > MAX_TENANT_BYTES:
        raise InvalidRequestError(f"tenant may have at most {MAX_TENANT_BYTES} bytes, got {size}", param="tenant")


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop one attempt. Unknown ids are ignored [unknown-id-ignored]; ids are compared exactly [exact-ids]."""

    rid: str


class CloseSession(msgspec.Struct, frozen=True, kw_only=True, tag="close_session"):
    """Forget a session and release its pages. Unknown ids are ignored."""

    session: str
    cache_salt: str = ""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Answered with `Pong` by the scheduler loop itself, so it proves that the loop turns."""

    nonce: int


class TokenizerRequest(msgspec.Struct, frozen=True, kw_only=True, tag="tokenizer"):
    """Send a part of the tokenizer's files, answered with `TokenizerPart`. Only for engines that report a digest."""

    digest: str
    """As the engine reports it (`EngineReady.tokenizer`)."""
    offset: int = 0
    """First byte of the part."""


EngineRequest = GenerateRequest | AbortRequest | CloseSession | Ping | TokenizerRequest
