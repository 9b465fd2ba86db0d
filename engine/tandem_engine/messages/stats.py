"""What an engine reports to its worker service: statistics twice a second, and traced attempts that have finished.

`EngineStats` has load, rates, and totals since the start. `EndedRequest` has the times of an attempt with a sampled
trace, sent once when the attempt is over; the worker service makes spans of it. It contains no text.

Fields with another `name` are encoded as in release 0, which is read up to release 2.
"""

from typing import Annotated

import msgspec

from tandem_engine.base.names import LinkTransport
from tandem_engine.messages.outputs import CacheHits, FetchReport, FinishReason, TransferReport
from tandem_engine.messages.requests import HandoffSide, Peer, TraceContext


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
    """As inferred from both processes; NIXL does not report what UCX has selected."""
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

    requested_total: int = msgspec.field(default=0, name="asked_total")
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
    served_total: int = msgspec.field(default=0, name="lent_total")
    """Prefixes sent to engines that asked."""
    served_pages_total: int = msgspec.field(default=0, name="lent_pages_total")


class StateAnchorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of states at which cached prefixes continue."""

    slots: int
    """Copies that there is memory for."""
    slot_bytes: int
    """Of one copy on one rank."""
    kept: int
    provisional: int = msgspec.field(name="on_trial")
    """Those from which no request has continued, within prompts. They make room first."""
    replaced_total: int
    """Copies that made room for others."""


MAX_STEP_S = 3_600.0
"""No step takes longer, and no part of it."""


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of a step that decodes, by what it computes: the sum of these, in seconds per token of each sequence."""

    base_s: float
    sequence_s: float
    """For each decoding sequence."""
    kv_token_s: float
    """For each token of context of the sequences of the step."""
    chunk_token_s: float
    """For each prompt token in the step."""


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
    step_base_s: float = 0.0
    """What a step takes whatever it computes, which `prefill_tokens_per_s` leaves out; 0 where it was not measured."""
    step_fit: StepFit | None = None
    """None until enough steps have been measured."""
    step_fit_errors_total: int = 0
    """Steps that could not be fitted."""
    recording_errors_total: int = 0
    """Errors in what only records or estimates."""
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
    poison_requests_total: int = msgspec.field(name="convicted_total")
    """Requests that ended because a step raises whenever they are in it."""
    corrupted_requests_total: int = msgspec.field(name="unsound_total")
    """Requests that ended because of NaN or infinite logits."""
    audit_failures_total: int
    output_tokens_per_s: float
    """Over the time since the report before."""
    paused: bool
    running_adapters: tuple[str, ...] = ()
    """Names of those that running requests have; of the next field those that waiting ones have."""
    waiting_adapters: tuple[str, ...] = ()
    waiting_for_adapter: int = 0
    """Requests whose adapter is being loaded, or has no room."""
    adapter_loads_total: int = 0
    """Adapters that requests have brought into memory."""
    adapter_load_failures_total: int = 0
    adapter_evictions_total: int = 0
    """Adapters that made way for others."""
    adapter_load_s_total: float = 0.0
    """Time spent on loads for requests."""
    transfer_unexpected_errors_total: int = msgspec.field(default=0, name="transfer_mishaps_total")
    """Unexpected errors in the transfer thread of rank 0; those of other ranks are only in the log."""
    handed_over_total: int = 0
    """Prompts computed here whose KV went to a peer."""
    transfer_exposed_s: float = 0.0
    """Of their transfers, what came after the prompt was computed, since start."""
    preempted_total: int = 0
    """Of the retracted: those put back for a more important request."""
    head_waits: str = ""
    """Why the first waiting request was not admitted: no_seat, no_row, no_pages, watermark, budget,
    chunk_in_progress, shared_prefix, after_retraction, swapped_first, decode_turn or delayed; "" if none."""
    speculation: SpeculationStats | None = None
    """None when the engine does not speculate."""
    host_cached_tokens_total: int = 0
    """Of `cached_tokens_total`, those copied back from host memory; the rest, but for the next, was on the device."""
    disk_cached_tokens_total: int = 0
    """Those that came from files."""
    unusable_tokens_total: int = 0
    """Prompt tokens that the cache had and requests computed, because no state was kept from which to continue there,
    or pages of a window were gone."""
    state_anchors: StateAnchorStats | None = None
    """None where no layer keeps a state, or nothing is cached."""
    host_pages: int = 0
    """Host pages there are; 0 without a hierarchical cache and swap space."""
    host_pages_used: int = 0
    """By cached blocks and swapped requests."""
    host_load_pages_per_s: float = 0.0
    """Recent rate at which pages come back from host memory; 0 before any has."""
    stored_blocks: int = 0
    """Blocks in files."""
    blocks_not_stored_total: int = 0
    """Blocks that were not written to files: the disk is full, fails or is slower than the traffic."""
    swapped: int = 0
    """Requests whose KV is in host memory."""
    swapped_out_total: int = 0
    swapped_in_total: int = 0
    swap_misses_total: int = 0
    """Swapped requests that had to be computed again."""
    leaving: int = 0
    """Running requests that are to continue on other workers; 0 unless the worker drains or computes prompts alone."""
    moved_total: int = 0
    """Running requests that went to another worker with their KV."""
    move_failures_total: int = 0
    """Those that went without it: their transfer failed, and another worker computed it again."""
    prefix_fetch: PrefixFetchStats = PrefixFetchStats()
    kernels_compiled_starting: int = 0
    """Kernels that a device's compiler made for this process before it served; 0 on a CPU."""
    kernels_compiled_serving: int = 0
    """Those made since, for each of which requests waited; of rank 0."""
    links: tuple[LinkReport, ...] = ()
    """To the peers that the worker service named, at most `MAX_LINKS`."""


MAX_REPORTED = 256
"""Attempts in one message."""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt that is over on one engine. Moments are Unix nanoseconds by that machine's clock; their differences
    are exact, for one reading of the clock places all of them."""

    rid: str
    context: TraceContext
    arrived_ns: int
    ended_ns: int
    scheduled_ns: int | None = None
    """When the first step that computes its prompt was planned."""
    first_token_ns: int | None = None
    """Of those sampled here."""
    transferred_ns: int | None = None
    """When its KV was committed (the receiving engine) or handed over (the sending one)."""
    side: HandoffSide | None = None
    moving: bool = False
    transfer: TransferReport | None = None
    fetch: FetchReport | None = None
    prompt_tokens: int
    cached_tokens: int | None = None
    """None when its prompt was not begun."""
    cache_hits: CacheHits | None = None
    resumed_tokens: int = 0
    output_tokens: int = 0
    """Beyond those; the one that came with the KV counts."""
    retractions: int = 0
    max_tokens: int
    temperature: float
    top_p: float
    finish: FinishReason | None = None
    """None: it continued on another worker, or was no longer wanted."""
    error: str = ""
    """Stable code of the error that ended it."""


class EndedRequests(msgspec.Struct, frozen=True, kw_only=True, tag="ended_requests"):
    """Sampled attempts that have ended since the last message."""

    requests: Annotated[tuple[EndedRequest, ...], msgspec.Meta(max_length=MAX_REPORTED)]
    lost: int
    """Since start: those that could not be reported."""
