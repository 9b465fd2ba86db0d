"""Records of recent requests, for `GET /v1/requests/{id}/explain` and for one log line each.

A record is created when a request is accepted and filled while it runs, so that a running request can be explained.
It contains no text and no addresses. No reference leads back to it, so the garbage collector skips it (`gc=False`).

`RequestJournal` finds records by our id and by the client's own:

    open      an object, which the running request fills
    closed    MessagePack bytes: less than half the memory, and a known size
    dropped   the oldest record if there are more than `capacity`; the oldest closed one if all closed ones together
              have more than `max_bytes`

Requests that were rejected before they were accepted have `REFUSED_RECORDS` places of their own, so that they never
replace accepted ones.
"""

import logging
import re
from collections import OrderedDict
from itertools import islice
from typing import Any

import msgspec

from tandem_engine.messages.outputs import CacheHits, FetchReport, TokenOutput, TransferReport
from tandem_services.common.recording import estimating, recording
from tandem_services.gateway.objectives import Objectives
from tandem_services.router.calibration import Prediction
from tandem_services.router.decision import OtherCell, PlannedFetch, PricedOptions, RouteDecision, ScoreTerm

logger = logging.getLogger(__name__)


class PredictedFetch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the router expected of a prefix fetch."""

    source: str
    tokens: int
    """Of the prompt, that the source was predicted to have cached."""
    seconds: float


class AttemptRecord(msgspec.Struct, kw_only=True, gc=False):
    """One attempt at one choice. Workers are named by incarnation."""

    decode: str
    prefill: str | None
    """None: the decode worker computed the prompt itself."""
    cell: OtherCell | None = None
    """The cell that its workers are in, and why; None: the gateway's own."""
    source: str
    """Source of the decision: redis, local or session."""
    placement: str
    """Placement of the prompt: pair, alone, local (predicted faster) or degraded (no prefill worker can)."""
    terms: tuple[ScoreTerm, ...]
    """Predicted seconds that made the choice."""
    candidates: PricedOptions | None = None
    """What it was chosen from. None of choices that others made (a session, a stand-alone router), of workers that take
    over what runs, and of decisions beyond `--explain-candidates`."""
    matched_tokens: int
    """Prompt tokens predicted to be cached."""
    fetch: PredictedFetch | None
    """A prefix that the worker that computes the prompt should fetch from another one."""
    resumed_tokens: int
    """Output tokens that earlier attempts had already produced."""
    began_s: float = 0.0
    """Since its choice began, which is when the prompt was known."""
    ended_s: float | None = None
    predicted: Prediction | None = None
    """Latency, of a first attempt whose workers the router has scored."""
    outcome: str = "running"
    """running, finished, stopped, moved, refused, or why it failed."""


class FoundTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Cached prompt tokens by where they were found."""

    device: int
    host: int
    """In host memory."""
    disk: int
    """In files."""
    fetched: int
    """On another worker, from which they were brought first."""

    @staticmethod
    def of(cached_tokens: int, hits: CacheHits) -> "FoundTokens":
        return FoundTokens(
            device=cached_tokens - hits.host - hits.disk - hits.fetched,
            host=hits.host,
            disk=hits.disk,
            fetched=hits.fetched,
        )


def _bare_attempt(record: "ChoiceRecord", decision: RouteDecision, *, began_s: float, **_: object) -> AttemptRecord:
    """An attempt of which nothing else can be recorded."""
    attempt = AttemptRecord(
        decode=decision.decode.incarnation,
        prefill=None,
        source=decision.source.value,
        placement=decision.placement.value,
        terms=(),
        matched_tokens=0,
        fetch=None,
        resumed_tokens=0,
        began_s=began_s,
    )
    record.attempts.append(attempt)
    return attempt


def _note_cached(record: "ChoiceRecord", output: TokenOutput) -> None:
    """What the usage of the answer says."""
    if record.cached_tokens is None:
        record.cached_tokens = output.cached_tokens


class ChoiceRecord(msgspec.Struct, kw_only=True, gc=False):
    """One choice of a request. Durations are seconds; None until known."""

    index: int
    attempts: list[AttemptRecord] = []
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Of these, those of the reasoning."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache of the worker that computed the prompt."""
    cache_hits: FoundTokens | None = None
    """Where it found them. None of a worker of a release that does not say."""
    unusable_tokens: int | None = None
    """Tokens behind them that it had in its cache, too, and computed, because it had no state, or not all pages of a
    window, from which to continue there. None as above."""
    transfer: TransferReport | None = None
    admission_s: float | None = None
    """In the gateway's queue, before there was a worker with room."""
    lacked_workers: bool = False
    """There was none of a role in that time: the wait is no property of a worker."""
    fetch: FetchReport | None = None
    """What became of bringing a prefix to the worker that computed the prompt."""
    queue_s: float | None = None
    delay_s: float | None = None
    """Of `queue_s`, what the prompt waited for the scheduling delay (`--scheduler-delay-factor`); None: it did not."""
    adapter_wait_s: float | None = None
    """What the prompt waited until its adapter was in memory; None: it did not."""
    prefill_s: float | None = None
    ttft_s: float | None = None
    """From accepting the request to the first token."""
    itl_s: float | None = None
    """Mean time between two tokens of an output that has ended; None of one token."""
    finish_reason: str | None = None

    @estimating(_bare_attempt)
    def begin_attempt(
        self, decision: RouteDecision, *, predicted: Prediction | None = None, resumed_tokens: int, began_s: float
    ) -> AttemptRecord:
        attempt = AttemptRecord(
            decode=decision.decode.incarnation,
            prefill=None if decision.prefill is None else decision.prefill.incarnation,
            cell=decision.cell,
            source=decision.source.value,
            placement=decision.placement.value,
            terms=decision.terms,
            candidates=decision.priced,
            matched_tokens=decision.matched_tokens,
            fetch=_predicted(decision.fetch),
            resumed_tokens=resumed_tokens,
            began_s=began_s,
            predicted=predicted,
        )
        self.attempts.append(attempt)
        return attempt

    @estimating(_note_cached)
    def note_output(self, output: TokenOutput) -> None:
        """Keep the facts of an output. Those about the prompt count once: for the first attempt."""
        if self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
            if output.cached_tokens is not None and output.cache_hits is not None:
                self.cache_hits = FoundTokens.of(output.cached_tokens, output.cache_hits)
                self.unusable_tokens = output.cache_hits.unusable
        if self.queue_s is None:
            self.queue_s, self.delay_s = output.queue_s, output.delay_s
        if self.adapter_wait_s is None:
            self.adapter_wait_s = output.adapter_wait_s
        if self.prefill_s is None:
            self.prefill_s = output.prefill_s
        if self.fetch is None:
            self.fetch = output.fetch
        if output.transfer is not None:
            self.transfer = output.transfer


class RequestRecord(msgspec.Struct, kw_only=True, gc=False):
    """One request of a client, with all its choices."""

    request_id: str
    client_request_id: str | None
    """X-Request-Id of the client, when it sent one."""
    trace_id: str | None = None
    """Of the OpenTelemetry trace that it belongs to, the client's or our own."""
    tenant: str = ""
    """Whose it is; "" without a key file."""
    endpoint: str
    model: str
    """The model's own name."""
    requested_model: str
    """What the client called it."""
    adapter: str | None = None
    """Digest of the adapter that the name stood for, in hexadecimal; None: the model alone."""
    stream: bool
    prompt_tokens: int
    n: int
    """Choices per prompt."""
    created: int
    """Unix seconds."""
    choices: list[ChoiceRecord]
    objectives: Objectives | None = None
    """Latency that it should have; None: it has no objectives."""
    status: int | None = None
    """HTTP status; 499 when the client went away, None while running."""
    error: str | None = None
    e2e_s: float | None = None

    @property
    def used_tokens(self) -> int:
        """What counts against its tenant's token limit: nothing, when no worker was used."""
        for choice in self.choices:
            if choice.attempts:
                return self.prompt_tokens + self.output_tokens
        return 0

    # Generators would cost the many requests of one choice more than what they add.

    @property
    def output_tokens(self) -> int:
        total = 0
        for choice in self.choices:
            total += choice.output_tokens
        return total

    @property
    def reasoning_tokens(self) -> int:
        total = 0
        for choice in self.choices:
            total += choice.reasoning_tokens
        return total

    @property
    def cached_tokens(self) -> int:
        """Of the first choice of each prompt: the other choices find what the first has computed."""
        total = 0
        for choice in self.choices[:: self.n]:
            total += choice.cached_tokens or 0
        return total

    @property
    def cache_hits(self) -> CacheHits:
        """Of those choices, in the worker's words."""
        hits = [choice.cache_hits for choice in self.choices[:: self.n] if choice.cache_hits is not None]
        return CacheHits(
            host=sum(hit.host for hit in hits),
            disk=sum(hit.disk for hit in hits),
            fetched=sum(hit.fetched for hit in hits),
            unusable=sum(choice.unusable_tokens or 0 for choice in self.choices[:: self.n]),
        )


@recording
def log_finished(record: RequestRecord) -> None:
    """One INFO line with the facts that `explain` answers, flat enough to query."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("request finished", extra={"fields": _summary(record)})


def _summary(record: RequestRecord) -> dict[str, Any]:
    attempts = [attempt for choice in record.choices for attempt in choice.attempts]
    transfers = [choice.transfer for choice in record.choices if choice.transfer is not None]
    first = record.choices[0] if record.choices else ChoiceRecord(index=0)
    hits = record.cache_hits
    return {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id,
        "trace_id": record.trace_id,
        "tenant": record.tenant,
        "endpoint": record.endpoint,
        "model": record.model,
        "requested_model": record.requested_model,
        "adapter": record.adapter,
        "stream": record.stream,
        "status": record.status,
        "error": record.error,
        "choices": len(record.choices),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "cached_host_tokens": hits.host,
        "cached_disk_tokens": hits.disk,
        "cached_fetched_tokens": hits.fetched,
        "unusable_tokens": hits.unusable,
        "output_tokens": record.output_tokens,
        "attempts": len(attempts),
        "prefill": [attempt.prefill for attempt in attempts],
        "decode": [attempt.decode for attempt in attempts],
        "source": [attempt.source for attempt in attempts],
        "placement": [attempt.placement for attempt in attempts],
        "outcome": [attempt.outcome for attempt in attempts],
        "predicted_s": [round(sum(term.seconds for term in attempt.terms), 6) for attempt in attempts],
        "pages_moved": sum(transfer.pages for transfer in transfers),
        "bytes_moved": sum(transfer.bytes for transfer in transfers),
        "pages_reused": sum(transfer.pages_reused for transfer in transfers),
        "pages_fetched": sum(choice.fetch.pages for choice in record.choices if choice.fetch is not None),
        "transfer_exposed_s": sum(transfer.exposed_s for transfer in transfers),
        "finish_reason": [choice.finish_reason for choice in record.choices],
        "admission_s": first.admission_s,
        "queue_s": first.queue_s,
        "delay_s": first.delay_s,
        "adapter_wait_s": first.adapter_wait_s,
        "prefill_s": first.prefill_s,
        "ttft_s": first.ttft_s,
        "e2e_s": record.e2e_s,
    }


def _predicted(fetch: PlannedFetch | None) -> PredictedFetch | None:
    if fetch is None:
        return None
    return PredictedFetch(source=fetch.source.incarnation, tokens=fetch.tokens, seconds=fetch.seconds)


JOURNAL_BYTES = 16 << 20

REFUSED_RECORDS = 256
"""Kept of requests that were refused, the newest."""

ENTRY_BYTES = 512
"""Memory of an entry in addition to its record: its ids, and its places in two dictionaries."""

_ANSWER_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestRecord).decode


class _Entry(msgspec.Struct, gc=False):
    tenant: str
    client_request_id: str | None
    record: RequestRecord | bytes

    def read(self) -> RequestRecord:
        return _decode(self.record) if isinstance(self.record, bytes) else self.record

    @property
    def size(self) -> int:
        """Bytes of a closed one; 0 of others, which belong to the running request."""
        return len(self.record) + ENTRY_BYTES if isinstance(self.record, bytes) else 0


class RequestJournal:
    """At most `capacity` records, and `max_bytes` of closed ones. One per gateway; belongs to its event loop."""

    def __init__(self, capacity: int, *, max_bytes: int = JOURNAL_BYTES) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._refused: OrderedDict[str, _Entry] = OrderedDict()
        self.accepted_total = 0
        self.bytes = 0
        """Of closed records."""
        self._aliases: dict[tuple[str, str], str] = {}
        """Tenant and its own id → ours: tenants cannot take each other's ids."""

    @recording
    def open(self, record: RequestRecord) -> None:
        self.accepted_total += 1
        self._entries[record.request_id] = _Entry(record.tenant, record.client_request_id, record)
        if record.client_request_id is not None:
            self._aliases[record.tenant, record.client_request_id] = record.request_id
        while len(self._entries) > self._capacity:
            self._drop(next(iter(self._entries)))

    @recording
    def close(self, record: RequestRecord) -> None:
        """`record` does not change from now on. Does nothing when it was dropped before."""
        entry = self._entries.get(record.request_id)
        if entry is None or entry.record is not record:
            return
        entry.record = _encode(record)
        self.bytes += entry.size
        while self.bytes > self._max_bytes:
            self._drop(next(request_id for request_id, each in self._entries.items() if each.size))

    @recording
    def refuse(self, record: RequestRecord) -> None:
        """A request that was answered with an error. One that was accepted has a record, which has the error."""
        if record.request_id in self._entries:
            return
        self._refused[record.request_id] = _Entry(record.tenant, record.client_request_id, _encode(record))
        if len(self._refused) > REFUSED_RECORDS:
            self._refused.popitem(last=False)

    def find(self, request_id: str, *, tenant: str = "") -> RequestRecord | None:
        """Of one tenant: by our id, by the id of the answer (`chatcmpl-…`, `cmpl-…`, `resp_…`, `msg_…`), or by the
        client's own.

        Of several requests with the same client id, the newest.
        """
        entry = self._entry(request_id) or self._entries.get(self._aliases.get((tenant, request_id), ""))
        entry = entry or self._refused_as(request_id, tenant)
        return entry.read() if entry is not None and entry.tenant == tenant else None

    def find_of_any_caller(self, request_id: str) -> RequestRecord | None:
        """As `find`, of all tenants."""
        entry = self._entry(request_id)
        if entry is None:
            ours = next((ours for (_, theirs), ours in self._aliases.items() if theirs == request_id), "")
            entry = self._entries.get(ours) or self._refused_as(request_id, None)
        return None if entry is None else entry.read()

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        open_records = (entry.record for entry in self._entries.values() if isinstance(entry.record, RequestRecord))
        return sum(record.e2e_s is None for record in open_records)

    def latest(self, number: int) -> list[RequestRecord]:
        """Of all tenants, newest first."""
        return [entry.read() for entry in islice(reversed(self._entries.values()), number)]

    def latest_refused(self, number: int) -> list[RequestRecord]:
        """Of all tenants, newest first."""
        return [entry.read() for entry in islice(reversed(self._refused.values()), number)]

    def _entry(self, request_id: str) -> _Entry | None:
        ours = _ANSWER_PREFIX.sub("", request_id)
        return self._entries.get(ours) or self._refused.get(ours)

    def _refused_as(self, client_request_id: str, tenant: str | None) -> _Entry | None:
        """The newest refused request that a client gave this id. `tenant` None: any."""
        return next(
            (
                entry
                for entry in reversed(self._refused.values())
                if entry.client_request_id == client_request_id and tenant in (None, entry.tenant)
            ),
            None,
        )

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self.bytes -= entry.size
        alias = (entry.tenant, entry.client_request_id or "")
        if self._aliases.get(alias) == request_id:
            del self._aliases[alias]
