"""The router's public types: what a gateway sends to the router, and what it gets back.

`MemberProofs` is the router's interface to a component that can prove membership: it checks that a worker answers over
an authenticated socket. A gateway has such sockets (`gateway.dispatch.dispatcher`). A stand-alone router has none and
relies on signed rows alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.base.release import RELEASE
from tandem_engine.config import Role
from tandem_engine.messages.control import AdapterMemory, ServedAdapter
from tandem_engine.messages.kv_events import CacheSpace


class Source(StrEnum):
    """Where the decision was made."""

    REDIS = "redis"
    """With the shared index and the reservations of all gateways."""
    LOCAL = "local"
    """From this gateway's last view, because Redis was away or slow."""
    SESSION = "session"
    """The conversation, whose worker it is."""
    ROUTER = "router"
    """A stand-alone router, whose ticket came with the request."""


class Placement(StrEnum):
    """Where the prompt is computed, and why."""

    PAIR = "pair"
    """A prefill worker; its KV moves."""
    ALONE = "alone"
    """The one worker that does both, or that keeps the conversation."""
    LOCAL = "local"
    """The decode worker, because that is predicted to be faster."""
    DEGRADED = "degraded"
    """The decode worker, because no prefill worker can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One incarnation of a worker, as a gateway needs to know it."""

    worker_id: str
    incarnation: str
    """`worker_id@number`: the process, not the address."""
    role: Role
    request_endpoint: str
    peer_endpoint: str
    compat_hash: str
    """Workers with different hashes hold KV in different shapes and are never paired."""
    context_length: int
    page_size: int
    model: str
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict, hash=False)
    """Those that it has a name for."""
    adapter_memory: AdapterMemory | None = field(default=None, hash=False)
    """Which adapters are in its memory; None: those that it has a name for, and it loads no others."""
    release: int = RELEASE
    """Of the worker's image (`base.release`)."""
    health_endpoint: str = ""
    """http:// address of its port for commands; "" where it reports none."""
    tokenizer: str = ""
    """Digest of its tokenizer's files (`tokenizer.bundle`); "" where it has none to send."""
    encoding: str = ""
    """Digest of its `tokenizer.json` alone; "" where it reports none."""

    @property
    def held_adapters(self) -> frozenset[str]:
        """Digests of all adapters in its memory: `has_adapter` of each."""
        if self.adapter_memory is not None:
            return frozenset(self.adapter_memory.resident)
        return frozenset(adapter.digest for adapter in self.adapters.values())

    def has_adapter(self, digest: bytes) -> bool:
        """Whether the adapter with this content is in its memory, under whatever name."""
        wanted = digest.hex()
        if self.adapter_memory is not None:
            return wanted in self.adapter_memory.resident
        return any(adapter.digest == wanted for adapter in self.adapters.values())

    def can_serve(self, digest: bytes, *, registered: bool) -> bool:
        """Whether it has the adapter with this content, or can load it: it has a name for the folder, or
        a request brings it, because the adapter is `registered`."""
        memory = self.adapter_memory
        if memory is None or self.has_adapter(digest):
            return self.has_adapter(digest)
        wanted = digest.hex()
        if wanted in memory.refused:
            return False
        return (registered and memory.loads) or any(each.digest == wanted for each in self.adapters.values())


class ScoreTerm(msgspec.Struct, frozen=True, gc=False):
    """One summand of a choice's price, for `explain`."""

    name: str
    seconds: float


class Latency(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a choice is predicted to make a request wait, by what its workers report; see `latency`."""

    terms: tuple[ScoreTerm, ...]
    """Seconds to the first token, from the choice on."""
    itl_s: float
    """Seconds between two tokens; 0 where the worker has measured no step."""
    kind: str
    """Of the worker that computes the prompt: see `WorkerRecord.kind`. The next is that of the decode worker."""
    decode_kind: str


class PricedPrefix(msgspec.Struct, frozen=True, gc=False):
    """A prefix that an option would bring from another worker."""

    source: str
    """Incarnation."""
    tokens: int
    """Prompt tokens that the source is predicted to have cached."""
    seconds: float


class PricedOption(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One way to serve a request, with its price: for `explain`, which keeps many. Workers are named by incarnation."""

    decode: str
    prefill: str | None
    """None: the decode worker would compute the prompt itself."""
    predicted_s: float
    """Sum of the terms. The lowest was chosen, at random of those that are equal."""
    terms: tuple[ScoreTerm, ...]
    matched_tokens: int
    """Prompt tokens predicted to be cached on the worker that would compute the prompt, on its device or in its host
    memory."""
    decode_matched_tokens: int
    """Those on the decode worker: a pair need not move them."""
    matched_host_tokens: int = 0
    """Tokens of `matched_tokens` that are in host memory alone."""
    decode_matched_host_tokens: int = 0
    """Tokens of `decode_matched_tokens` that are in host memory alone."""
    fetch: PricedPrefix | None


class PricedOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a choice was made from."""

    options: tuple[PricedOption, ...]
    """The one that was chosen, then the others, cheapest first; at most `EXPLAINED_OPTIONS`."""
    more: int
    """Others that were dearer than all of these."""


EXPLAINED_OPTIONS = 8


class Absence(NamedTuple):
    """An adapter that a worker would have to load."""

    load_s: float
    """Predicted seconds until it is there."""
    evict_s: float
    """Seconds to load again what makes way for it; 0 where there is room."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class RouteQuery:
    """One attempt that needs a worker."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    """Prompt and, on a resumed attempt, the output so far."""
    cache_salt: str = ""
    max_tokens: int = 256
    """Output tokens the request may still produce."""
    exclude: frozenset[str] = frozenset()
    """Incarnations that this request has already failed on."""
    only: frozenset[str] | None = None
    """The only incarnations that it may have, few enough to be named in a call; None: all that are not excluded."""
    paired: bool = False
    """A decode worker is to compute the prompt only where no prefill worker can."""
    may_probe: bool = True
    """It may go to a worker that reports to be too slow, which then measures itself (`probing`)."""
    compat_hash: str | None = None
    """Compat hash of the workers whose output is continued: other weights would continue it with other tokens
    [same-kind-paired]."""
    session_key: str = ""
    """Whose request it is, for the policy `session`."""
    adapter: bytes = b""
    """Digest of the adapter that computes it, b"" for the base model: workers that neither have it nor can load it are
    not chosen."""
    registered: bool = False
    """The request names the folder of its adapter."""
    adapter_size: int = 0
    """Bytes of its tensors; 0 if not known."""
    absences: Mapping[str, Absence] = field(default_factory=dict)
    """By incarnation, of workers that have to load it: the router sets this."""

    @property
    def space(self) -> CacheSpace:
        """Where its prefix may be cached."""
        return CacheSpace(self.cache_salt, self.adapter)

    def excluding(self, incarnations: frozenset[str]) -> "RouteQuery":
        """The same without these workers."""
        # A copy costs as much as many a decision, and mostly there is nothing to exclude.
        return self if incarnations <= self.exclude else replace(self, exclude=self.exclude | incarnations)

    def served_by(self, worker: WorkerView) -> bool:
        """Whether `worker` has its adapter or can load it, if it has one."""
        return not self.adapter or worker.can_serve(self.adapter, registered=self.registered)


class OtherCell(msgspec.Struct, frozen=True, gc=False):
    """Why a request is served by another cell than its gateway's (`router.cells`)."""

    name: str
    reason: str
    """full, no_worker, no_redis, or kept: what it belongs to is there."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Load that a choice adds to one worker."""

    incarnation: str
    queue_tokens: int
    sequences: int
    room_tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a choice reserved. Opaque to the gateway, which gives it back through `Router.release`."""

    bucket: int | None
    """Bucket of the shared reservation (Redis milliseconds); None when nothing was reserved in Redis."""
    claims: tuple[Claim, ...]
    serial: int = 0
    """Number of the choice within its router, so that releasing twice counts once."""
    note: int = 0
    """Number in Redis of what was noted of its prompt as in flight; 0 when nothing was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFetch:
    """A prefix that the computing worker should fetch from another worker, because that is predicted to be faster."""

    source: WorkerView
    tokens: int
    """Prompt tokens that the source is predicted to have cached."""
    seconds: float
    """Predicted."""
    within_s: float
    """It is not worth waiting for longer."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class RouteDecision:
    """Where one attempt goes."""

    request_id: str
    decode: WorkerView
    prefill: WorkerView | None
    """None: the decode worker computes the prompt itself."""
    source: Source
    placement: Placement
    terms: tuple[ScoreTerm, ...]
    """Predicted seconds; their sum was minimized."""
    matched_tokens: int
    """Prompt tokens predicted to be cached on the worker that computes the prompt. A hint, never a promise."""
    fetch: PlannedFetch | None = None
    priced: PricedOptions | None = None
    """The options it was chosen from; None when they were not requested, or nothing was scored."""
    latency: Latency | None = None
    """None where nothing was scored: of conversations that a worker keeps, and of workers that take over what runs."""
    cell: OtherCell | None = None
    """Where these workers are; None: in the gateway's own cell."""
    reservation: Reservation


class NoWorkersError(Exception):
    """No live worker can take the request now. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class MemberProofs(Protocol):
    """Belongs to the router's event loop."""

    def watch(self, workers: Iterable[WorkerView], *, unlisted: frozenset[str]) -> None:
        """These may be members. Have some prove it, again and again, and of `unlisted` ones, that Redis does not name,
        all; and no others."""
        ...

    @property
    def silent(self) -> frozenset[str]:
        """Incarnations that were asked and have not answered yet."""
        ...

    def proven(self, incarnation: str) -> bool:
        """Whether it has answered, and was not found silent or dead since."""
        ...

    def watch_again(self, worker: WorkerView, *, unlisted: bool) -> None:
        """This one may be a member again, beside those that are watched. `unlisted`: Redis does not name it."""
        ...

    def proven_now(self, incarnation: str) -> bool:
        """Whether `prove` would answer yes without a wait. It counts as used then."""
        ...

    async def prove(self, worker: WorkerView, *, within_s: float) -> bool:
        """Whether it answers within this time, or has lately."""
        ...
