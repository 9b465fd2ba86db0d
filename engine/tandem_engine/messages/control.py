"""Engine process ↔ the worker service that started it.

An operator's order carries a nonce and is answered by `OrderDone` or `OrderRefused` with the same one; the
worker service's own orders are not answered, but for `Audit`.
"""

from enum import StrEnum
from math import inf
from typing import Annotated

import msgspec

from tandem_engine.messages.ended_requests import EndedRequests
from tandem_engine.messages.kv_events import KvEventBatch
from tandem_engine.messages.requests import Peer
from tandem_engine.names import LinkTransport

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

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank."""
        item = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim * item


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


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start, or, after `EngineReady`, cannot go on. `message` is one sentence for the operator."""

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


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """What became of drafts since start."""

    proposer: str
    """NGRAM, DRAFT or EAGLE."""
    runs_total: int
    """Drafted runs that were verified: one per request and step with drafts."""
    drafted_total: int
    """Tokens proposed and verified."""
    accepted_total: int
    """Of these, tokens that became output, or would have but for a stop before them."""
    accept_length: float
    """Recent mean of tokens per run: accepted drafts and the bonus token."""
    propose_s: float
    """Time spent on proposing."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of the way KV takes from this engine to one peer."""

    peer: str
    """Incarnation."""
    bytes_per_s: float = 0.0
    """Of WRITEs from here to there, 3 significant digits: the self-test's, kept current by pushes. 0: none measured."""
    latency_s: float = 0.0
    """Of a WRITE of one page, from asking for it until it is known to be done. 0: not measured."""
    transport: LinkTransport = LinkTransport.UNKNOWN
    """As far as it can be told from both processes; NIXL does not say what UCX has chosen."""
    age_s: float = 0.0
    """Since the figures last changed."""
    broken: bool = False
    """The last WRITE failed because the peer could not be reached."""
    condition: str = ""
    """What is wrong with the link, for an operator; "" when nothing is."""
    problem: str = ""
    """Why the last self-test of the link gave no figure; "" when it did."""


class PrefixFetchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes brought from other engines instead of computing them, since start."""

    asked_total: int = 0
    fetched_total: int = 0
    """Of those, the ones that brought at least a page."""
    missed_total: int = 0
    """The other engine had nothing of it any more."""
    failed_total: int = 0
    """Given up: late, torn, refused, or the other engine was lost."""
    skipped_total: int = 0
    """Not begun, because memory is short or the prefix is here by now."""
    pages_total: int = 0
    bytes_total: int = 0
    wait_s: float = 0.0
    """From asking to the end, of all together."""
    lent_total: int = 0
    """Prefixes sent to engines that asked."""
    lent_pages_total: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Twice a second. `loop_count` proves that the scheduler loop turns."""

    loop_count: int
    running: int
    waiting: int
    transferring: int
    inflight: int
    waiting_tokens: int
    """Prompt tokens not yet computed, queue and current chunks together."""
    oldest_wait_s: float = 0.0
    """How long the first of the requests waits that have not begun."""
    free_pages: int
    evictable_pages: int
    total_pages: int
    quarantined_pages: int
    quarantined_for: tuple[str, ...] = ()
    """The silent writers that they wait for, by incarnation."""
    fenced_writers: tuple[Peer, ...] = ()
    """Fenced ones whose processes must have ended before their pages are used again (`PeerEnded`)."""
    prefill_tokens_per_s: float
    decode_step_s: float
    """Recent mean duration of a decode step."""
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    requests_total: int
    aborted_total: int
    retracted_total: int
    transfers_total: int
    transfer_failures_total: int
    transfer_bytes_total: int
    digest_mismatches_total: int
    overlap_hidden_s: float
    """Scheduling time spent while a forward was computing, since start."""
    schedule_s: float
    """All scheduling time since start: planning, launching and settling."""
    plan_s: float
    launch_s: float
    settle_s: float
    wait_s: float
    """Time the scheduler has waited for steps, since start."""
    failed_total: int
    """Requests ended by an error."""
    refused_total: int
    engine_errors_total: int
    """Steps that raised."""
    convicted_total: int
    """Requests that ended because a step raises whenever they are in it."""
    unsound_total: int
    """Requests that ended because of NaN or infinite logits."""
    audit_failures_total: int
    output_tokens_per_s: float
    """Over the time since the report before."""
    paused: bool
    handed_over_total: int = 0
    """Prompts computed here whose KV went to a peer."""
    transfer_exposed_s: float = 0.0
    """Of their transfers, what came after the prompt was computed, since start."""
    preempted_total: int = 0
    """Of the retracted: those put back for a more important request."""
    head_waits: str = ""
    """Why the first waiting request was not admitted: no_seat, no_row, no_pages, watermark, budget,
    chunk_in_progress, shared_prefix, after_retraction, swapped_first or decode_turn; "" when nobody waits."""
    speculation: SpeculationStats | None = None
    """None when the engine does not speculate."""
    host_cached_tokens_total: int = 0
    """Of `cached_tokens_total`, those copied back from host memory; the rest, but for the next, was on the device."""
    disk_cached_tokens_total: int = 0
    """Those that came from files."""
    host_pages: int = 0
    """Host pages there are; 0 without a hierarchical cache and swap space."""
    host_pages_used: int = 0
    """By cached blocks and swapped requests."""
    host_load_pages_per_s: float = 0.0
    """Recent rate at which pages come back from host memory; 0 before any has."""
    stored_blocks: int = 0
    """Blocks in files."""
    swapped: int = 0
    """Requests whose KV is in host memory."""
    swapped_out_total: int = 0
    swapped_in_total: int = 0
    swap_misses_total: int = 0
    """Swapped requests that had to be computed again."""
    leaving: int = 0
    """Running requests that are to go on elsewhere; 0 unless the worker drains or computes prompts alone."""
    moved_total: int = 0
    """Running requests that went to another worker with their KV."""
    move_failures_total: int = 0
    """Those that went without it: their transfer failed, and another worker computed it again."""
    prefix_fetch: PrefixFetchStats = PrefixFetchStats()
    links: tuple[LinkReport, ...] = ()
    """To the peers that the worker service named, at most `MAX_LINKS`."""


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


class PauseMode(StrEnum):
    """What happens to running requests. Names follow SGLang's pause_generation."""

    ABORT = "abort"
    RETRACT = "retract"
    """They give back their KV and are computed again."""
    IN_PLACE = "in_place"
    """They keep it."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort_requests"):
    """End one request by its exact id (T11), or all."""

    nonce: int
    rid: str | None


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache"):
    """Empty the prefix cache. Refused while requests hold KV."""

    nonce: int


class PauseGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    nonce: int
    mode: PauseMode


class ResumeGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    nonce: int


class ReloadWeights(msgspec.Struct, frozen=True, kw_only=True, tag="reload"):
    """Replace the weights by those in `path`, on the engine's own disk; None reads the folder it serves again."""

    nonce: int
    path: str | None


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile"):
    """Trace the next `steps` steps, for at most `seconds`."""

    nonce: int
    steps: int
    seconds: float


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile"):
    """End a trace early. Its file is written."""

    nonce: int


class DecodeElsewhere(msgspec.Struct, frozen=True, kw_only=True, tag="decode_elsewhere"):
    """Have running requests, and those that will run, go on at other workers; or no longer."""

    nonce: int
    wanted: bool
    within_s: float = inf
    """What nobody has taken by then is ended, as worth another attempt elsewhere."""


OrderAtOnce = (
    AbortRequests | DecodeElsewhere | FlushCache | PauseGeneration | ResumeGeneration | StartProfile | StopProfile
)
OperatorOrder = OrderAtOnce | ReloadWeights
WorkerToEngine = Audit | ReplayCache | PeerGone | PeerEnded | MeetPeers | Drain | Shutdown | OperatorOrder
