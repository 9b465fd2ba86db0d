"""Control messages between an engine process and the worker service that started it.

An administrator's command carries a nonce, and its reply, `OrderDone` or `OrderRefused`, has the same one. Commands of
the worker service itself have no reply, except `Audit`.
"""

from enum import StrEnum
from math import inf
from typing import Annotated

import msgspec

from tandem_engine.messages.kv_events import KvEventBatch
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.stats import EndedRequests, EngineStats

MAX_LINKS = 64
"""Peers that one engine measures its links to. Reports and registry entries grow with it."""


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's KV. All but `num_kv_heads` and `tp_size` must agree before a worker may write into another's pages."""

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    """That one rank holds."""
    head_dim: int
    page_size: int
    dtype: str
    """Of pages."""
    layout_version: int
    tp_size: int
    model_dtype: str = ""
    """That the model computes in, where it is another one."""
    kv_scales: str = ""
    """Digest of the scales of pages of float8; "" for pages of another dtype, and where all scales are 1."""
    value_width: int = 0
    """Of pages of latents, the numbers at the beginning of each that are V; 0 for pages of K and V."""
    states: str = ""
    """What a rank keeps of a sequence in layers with states, and of how many ranks; "" where there are none. Peers need
    those of the model in common, where ranks divide them by heads."""
    numerics: int = 0
    """Revision of the numbers: grows when a release computes other KV of equal tokens, with layout and dtype as before.
    As all fields with defaults, it changes no `compat_hash` until it has another value."""
    rows: str = ""
    """Heads and their width in each layer, and of how many ranks, where layers differ; "" where they do not."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank."""
        item = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}[self.dtype]
        parts = 1 if self.value_width else 2
        return self.num_layers * parts * self.num_kv_heads * self.page_size * self.head_dim * item


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that an engine has loaded."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    digest: Annotated[str, msgspec.Meta(pattern=r"^(?!0{32}$)[0-9a-f]{32}$")]
    """Of its content, in hexadecimal."""
    rank: Annotated[int, msgspec.Meta(ge=1)]
    """The largest of its matrices."""
    root: Annotated[str, msgspec.Meta(max_length=256)]
    """Name of the folder that it was read from."""
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes of its tensors; 0 where its release reports none."""


MAX_RESIDENT = 512
"""Digests in one report: more than an engine ever keeps in memory."""
MAX_REFUSED_ADAPTERS = 32
MAX_FAILED_ADAPTERS = 8
"""Failed loads in one report: the newest."""
MAX_FAILURE_TEXT = 512

HexDigest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]


class FailedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that an engine could not load for a request."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    digest: HexDigest
    reason: Annotated[str, msgspec.Meta(max_length=MAX_FAILURE_TEXT)]


class AdapterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the adapters of an engine are, and what it costs to bring one in: what routing prices."""

    limit: Annotated[int, msgspec.Meta(ge=1)]
    """Adapters that it keeps in memory at a time."""
    loads: bool = False
    """It loads the adapter of a request from the folder that the request names."""
    resident: Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=MAX_RESIDENT)] = ()
    """Digests of those in memory that new requests have at once."""
    refused: Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=MAX_REFUSED_ADAPTERS)] = ()
    """Digests that it could not load just now, or was commanded to unload."""
    failed: Annotated[tuple[FailedAdapter, ...], msgspec.Meta(max_length=MAX_FAILED_ADAPTERS)] = ()
    """Those whose last load for a request has failed, not long ago."""
    mean_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes of one in memory."""
    byte_s: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Seconds per byte of its loads, as measured; 0 before the first."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once, when the model is loaded, a self-test has passed and the sockets are bound."""

    incarnation: str
    request_endpoint: str
    peer_endpoint: str
    geometry: KvGeometry
    compat_hash: str
    context_length: int
    max_running_requests: int
    total_pages: int
    prefill_tokens_per_s: float
    """Measured by the self-test at start; later reports refine it."""
    decode_step_s: float
    """A decode step of one sequence, from the same self-test."""
    transport: str
    """nixl or none."""
    adapters: tuple[ServedAdapter, ...] = ()
    adapter_memory: AdapterMemory | None = None
    """None where its release reports none."""
    device: str = ""
    """What computes, for people: `cpu`, or the GPU's number and name. Empty where its release reports nothing."""
    kernel_target: str = ""
    """The kind of CPU that its kernels are compiled for (`kernels.cpu.target`); empty on a GPU."""
    tokenizer: str = ""
    """Digest of the tokenizer's files, which gateways may request; empty where there are none to send."""
    encoding: str = ""
    """Digest of `tokenizer.json` alone (`tokenizer.bundle`); empty as `tokenizer`."""


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start, or, after `EngineReady`, cannot continue. `message` is one sentence for the operator."""

    message: str
    code: str


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, tag="node"):
    """A node that is not the first lives, and so does node 0 once it was joined. About once a second."""

    node_rank: int
    serving: bool
    """Its ranks take part in the engine's steps."""


class DrainWanted(msgspec.Struct, frozen=True, kw_only=True, tag="drain_wanted"):
    """The engine should be drained, because a part of it is about to go. Sent once."""

    reason: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True, tag="audit_report"):
    """Answer to `Audit`: the five sets of pages, and what is wrong with them (empty when sound)."""

    nonce: int
    problems: tuple[str, ...]
    idle: bool
    free_pages: int
    tree_pages: int
    private_pages: int
    held_pages: int


class OrderDone(msgspec.Struct, frozen=True, kw_only=True, tag="order_done"):
    """An operator's order was carried out."""

    nonce: int
    message: str
    """One sentence."""
    figures: dict[str, int | str]


class OrderRefused(msgspec.Struct, frozen=True, kw_only=True, tag="order_refused"):
    """An operator's order changed nothing."""

    nonce: int
    code: str
    """Of the `EngineError`: busy, config_error, checkpoint_error."""
    message: str


EngineToWorker = (
    EngineReady
    | EngineFailed
    | NodeReport
    | DrainWanted
    | EngineStats
    | AuditReport
    | OrderDone
    | OrderRefused
    | KvEventBatch
    | EndedRequests
)


class Audit(msgspec.Struct, frozen=True, kw_only=True, tag="audit"):
    nonce: int


class ReplayCache(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """Send the whole prefix cache again as KV events."""


class PeerGone(msgspec.Struct, frozen=True, kw_only=True, tag="peer_gone"):
    """An incarnation is fenced: its lease ran out or a newer one took its name."""

    incarnation: str


class PeerEnded(msgspec.Struct, frozen=True, kw_only=True, tag="peer_ended"):
    """The process of a fenced incarnation has ended: nothing of it can be in the middle of a write."""

    incarnation: str


class MeetPeers(msgspec.Struct, frozen=True, kw_only=True, tag="meet_peers"):
    """Peers that KV may be exchanged with, all of them: the engine gets to know and measures the links to them."""

    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_LINKS)]


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Take no new requests and refuse those not begun; running ones move to other workers, or finish."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Abort what is left and exit."""


UNANSWERED = 0
"""Nonce of a command that the process of the engine gives itself, which nothing is answered to."""


class PauseMode(StrEnum):
    """What happens to running requests. Names follow SGLang's pause_generation."""

    ABORT = "abort"
    RETRACT = "retract"
    """They give back their KV and are computed again."""
    IN_PLACE = "in_place"
    """They keep it."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort_requests"):
    """End one request by its exact id [exact-ids], those of a client that is gone, or all."""

    nonce: int = UNANSWERED
    rid: str | None
    """None: those of `client`; of all clients if that is None as well."""
    client: bytes | None = None


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache"):
    """Empty the prefix cache. Refused while requests hold KV."""

    nonce: int = UNANSWERED


class PauseGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    nonce: int = UNANSWERED
    mode: PauseMode
    refuse_new: bool = True
    """New requests are refused, so that other workers serve them; else they wait here."""


class ResumeGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    nonce: int = UNANSWERED


class ReloadWeights(msgspec.Struct, frozen=True, kw_only=True, tag="reload"):
    """Replace the weights by those in `path`, on the engine's own disk; None reads the folder it serves again."""

    nonce: int
    path: str | None


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load the adapter in `path`, on the engine's own disk, for requests that name it."""

    nonce: int
    name: str
    path: str
    replaces: bool
    """It may take the place of another one of its name."""
    digest: str = ""
    """In hexadecimal: other content is refused. "" for any."""
    pinned: bool = False
    """It makes way for no other adapter."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Give an adapter to no new request, and free its memory with the end of the last that has it."""

    nonce: int
    name: str
    digest: str = ""
    """In hexadecimal: refused where the name stands for other content. "" for any."""
    cached: str = ""
    """Digest of content that a request has brought in, and that goes as well; "" for none."""


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile"):
    """Trace the next `steps` steps, for at most `seconds`."""

    nonce: int
    steps: int
    seconds: float


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile"):
    """End a trace early. Its file is written."""

    nonce: int


class DecodeElsewhere(msgspec.Struct, frozen=True, kw_only=True, tag="decode_elsewhere"):
    """Have running requests, and those that will run, continue at other workers; or no longer."""

    nonce: int = UNANSWERED
    wanted: bool
    within_s: float = inf
    """Requests without another worker by then end with a retryable error."""


OrderAtOnce = (
    AbortRequests | DecodeElsewhere | FlushCache | PauseGeneration | ResumeGeneration | StartProfile | StopProfile
)
OperatorOrder = OrderAtOnce | ReloadWeights | LoadAdapter | UnloadAdapter
WorkerToEngine = Audit | ReplayCache | PeerGone | PeerEnded | MeetPeers | Drain | Shutdown | OperatorOrder
