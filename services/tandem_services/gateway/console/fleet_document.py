"""The fleet and this gateway as a JSON document for the console: numbers and names, no addresses.

Counters are totals since the start of a worker; a viewer computes rates from two documents. The document is bounded: of
a fleet larger than a page can show, the remaining workers are only counted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tandem_engine.base.progress import Progress
from tandem_engine.base.release import product_version
from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport
from tandem_services.common.health import Health
from tandem_services.gateway.console.latency_rows import LatencyRow
from tandem_services.gateway.observe.explain import RequestJournal, RequestRecord
from tandem_services.router.keys import LEASE_MS
from tandem_services.router.membership import FleetMember, FleetView
from tandem_services.router.row_values import Figures, read_figures
from tandem_services.router.starting import StartingWorker

SAMPLES = 200
"""Requests that are looked at: enough for a 95th percentile, few enough to be summed up every second."""

ROWS = 100

REFUSED_ROWS = 40
"""Of them, requests that were refused before they were accepted: a flood of these leaves room for others."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Of the last `finished` requests that have ended, at most `SAMPLES`."""

    accepted_total: int
    """Since the gateway's start."""
    finished: int
    failed: int
    """Of them, with a status other than 200; 499 is a client that left."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    prompt_tokens: int
    cached_tokens: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line about a request. Its whole story is in its record."""

    request_id: str
    tenant: str
    endpoint: str
    model: str
    stream: bool
    created: int
    status: int | None
    """None while it runs."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    """More than one per choice: something had to be begun again, or moved."""
    choices: int
    prefill: str | None
    decode: str | None
    """Incarnations of the last attempt; None before there is one."""
    ttft_s: float | None
    e2e_s: float | None


def traffic(journal: RequestJournal) -> Traffic:
    ended = [record for record in journal.latest(SAMPLES) if record.e2e_s is not None]
    times = sorted(choice.ttft_s for record in ended for choice in record.choices if choice.ttft_s is not None)
    return Traffic(
        accepted_total=journal.accepted_total,
        finished=len(ended),
        failed=sum(record.status != 200 for record in ended),
        ttft_p50_s=_percentile(times, 0.50),
        ttft_p95_s=_percentile(times, 0.95),
        prompt_tokens=sum(record.prompt_tokens for record in ended),
        cached_tokens=sum(record.cached_tokens for record in ended),
    )


def latest_requests(journal: RequestJournal) -> list[RequestRow]:
    """Of all tenants, newest first, accepted or refused."""
    records = [*journal.latest_refused(REFUSED_ROWS), *journal.latest(ROWS)]
    return [_row(record) for record in sorted(records, key=lambda each: -each.created)[:ROWS]]


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was refused before it was accepted. Nothing of its body is kept."""

    request_id: str
    tenant: str
    endpoint: str
    created: int
    status: int | None
    error: str | None
    """Type, code and parameter."""


def latest_errors(journal: RequestJournal) -> list[ErrorRow]:
    """Of all tenants, newest first."""
    return [
        ErrorRow(
            request_id=record.request_id,
            tenant=record.tenant,
            endpoint=record.endpoint,
            created=record.created,
            status=record.status,
            error=record.error,
        )
        for record in journal.latest_refused(ROWS)
    ]


def _row(record: RequestRecord) -> RequestRow:
    attempts = [attempt for choice in record.choices for attempt in choice.attempts]
    last = attempts[-1] if attempts else None
    return RequestRow(
        request_id=record.request_id,
        tenant=record.tenant,
        endpoint=record.endpoint,
        model=record.model,
        stream=record.stream,
        created=record.created,
        status=record.status,
        error=record.error,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        attempts=len(attempts),
        choices=len(record.choices),
        prefill=None if last is None else last.prefill,
        decode=None if last is None else last.decode,
        ttft_s=next((choice.ttft_s for choice in record.choices if choice.ttft_s is not None), None),
        e2e_s=record.e2e_s,
    )


def _percentile(ordered: list[float], share: float) -> float | None:
    """By nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


VERSION = product_version()
MAX_WORKERS_SHOWN = 256
MAX_LINKS_SHOWN = 512

MAX_CHARACTERS = 200
"""Of any text: what stands in Redis is not to be trusted with more."""

MAX_ADAPTERS_SHOWN = 32
"""Of a worker."""

SUSPECT = "suspect"
"""State of a worker to which this gateway lost its connection, whatever the registry contains."""

SKEWED = "skewed"
"""State of a worker whose release is outside the window of this gateway's: it gets no requests."""

_ROLES = {role: place for place, role in enumerate(Role)}


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as it reports itself."""

    worker_id: str
    incarnation: str
    role: str
    model: str
    state: str
    """ready, standby, draining, paused, stalled, suspect or skewed."""
    page_size: int
    context_length: int
    queue_tokens: float
    """Prompt tokens not yet computed."""
    sequences: float
    max_sequences: float
    prefill_tokens_per_s: float
    decode_step_s: float
    adapters: tuple[str, ...]
    """Names of LoRA adapters that it has loaded; at most `MAX_ADAPTERS_SHOWN`."""
    figures: Figures | None
    """None when its statistics are malformed."""


class StartingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is not registered yet: what its engine does."""

    worker_id: str
    incarnation: str
    role: str
    model: str
    phase: str
    share: float | None
    """Done of the phase; None where that is not known."""
    progress: str
    """The same as text, with the amount."""
    seconds: float
    """Since its start."""


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The way KV takes from one worker to another, as the sender has measured it. 0: not measured."""

    source: str
    target: str
    transport: str
    bytes_per_s: float
    latency_s: float
    age_s: float
    broken: bool
    problem: str
    """What is wrong with it; "" when nothing is."""


class GatewayRow(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway that answers. Other gateways have other requests."""

    version: str
    clusters: tuple[str, ...]
    """Of its models' fleets."""
    roots: tuple[str, ...]
    """Repository and commit of those models that are from a hub."""
    uptime_s: float
    requires_key: bool
    """Of all requests but those for the page itself."""
    draining: bool
    running: int
    waiting: int
    """In its queue, for a worker with room."""
    traffic: Traffic


class FleetDocument(msgspec.Struct, frozen=True, kw_only=True):
    time: float
    """Unix seconds."""
    redis: str
    """answering or away; of several fleets the worst."""
    view_age_s: float
    """Since Redis last returned the members; the longest time of several fleets."""
    gateway: GatewayRow
    workers: tuple[WorkerRow, ...]
    workers_total: int
    starting: tuple[StartingRow, ...]
    """At most `keys.MAX_STARTING` of each fleet."""
    links: tuple[LinkRow, ...]
    links_total: int
    latency: tuple[LatencyRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayFigures:
    """Where the gateway's own figures come from. Each is read for every document."""

    health: Health
    running: Callable[[], int]
    waiting: Callable[[], int]
    journal: RequestJournal
    latency: Callable[[], tuple[LatencyRow, ...]]
    uptime_s: Callable[[], float]
    requires_key: bool


class ViewedFleet(NamedTuple):
    """One model's, as its router sees it."""

    cluster: str
    look: Callable[[], FleetView]
    """From memory."""
    root: str = ""
    """What the model is; empty where it is from no hub."""


def fleet_document(fleets: Sequence[ViewedFleet], gateway: GatewayFigures) -> FleetDocument:
    """All fleets of a gateway as one: their workers say which model they have."""
    views = [fleet.look() for fleet in fleets]
    age_s = max((view.age_s for view in views), default=0.0)
    members = sorted((member for view in views for member in view.members), key=_by_role)
    links = [(member.record.view.incarnation, each) for member in members for each in member.record.links]
    links.sort(key=_worst_first)
    return FleetDocument(
        time=time.time(),
        redis="answering" if age_s < LEASE_MS / 1000 else "away",
        view_age_s=round(age_s, 3),
        gateway=GatewayRow(
            version=VERSION,
            clusters=tuple(dict.fromkeys(fleet.cluster for fleet in fleets)),
            roots=tuple(dict.fromkeys(fleet.root for fleet in fleets if fleet.root)),
            uptime_s=round(gateway.uptime_s(), 1),
            requires_key=gateway.requires_key,
            draining=gateway.health.draining,
            running=gateway.running(),
            waiting=gateway.waiting(),
            traffic=traffic(gateway.journal),
        ),
        workers=tuple(_worker(member) for member in members[:MAX_WORKERS_SHOWN]),
        workers_total=len(members),
        starting=_starting(views),
        links=tuple(_link(source, each) for source, each in links[:MAX_LINKS_SHOWN]),
        links_total=len(links),
        latency=gateway.latency(),
    )


def _worker(member: FleetMember) -> WorkerRow:
    record = member.record
    view, load = record.view, record.load
    return WorkerRow(
        worker_id=_cut(view.worker_id),
        incarnation=_cut(view.incarnation),
        role=view.role.value,
        model=_cut(view.model),
        state=_state(member),
        page_size=view.page_size,
        context_length=view.context_length,
        queue_tokens=load.queue_tokens,
        sequences=load.sequences,
        max_sequences=load.max_sequences,
        prefill_tokens_per_s=load.prefill_rate,
        decode_step_s=load.step_s,
        adapters=tuple(_cut(name) for name in sorted(view.adapters)[:MAX_ADAPTERS_SHOWN]),
        figures=read_figures(record.details),
    )


def _state(member: FleetMember) -> str:
    if member.skewed:
        return SKEWED
    return SUSPECT if member.suspect else member.record.state.value


def _starting(views: Sequence[FleetView]) -> tuple[StartingRow, ...]:
    """A worker that is registered has started, whatever it last reported."""
    registered = {member.record.view.incarnation for view in views for member in view.members}
    reports = (each for view in views for each in view.starting if each.incarnation not in registered)
    return tuple(map(_starting_row, reports))


def _starting_row(worker: StartingWorker) -> StartingRow:
    progress = Progress(phase=worker.phase, done=worker.done, total=worker.total, unit=worker.unit)
    return StartingRow(
        worker_id=_cut(worker.worker_id),
        incarnation=_cut(worker.incarnation),
        role=_cut(worker.role),
        model=_cut(worker.model),
        phase=_cut(worker.phase),
        share=progress.share,
        progress=_cut(str(progress)),
        seconds=worker.seconds,
    )


def _link(source: str, link: LinkReport) -> LinkRow:
    return LinkRow(
        source=_cut(source),
        target=_cut(link.peer),
        transport=link.transport.value,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        age_s=link.age_s,
        broken=link.broken,
        problem=_cut(_problem(link)),
    )


def _problem(link: LinkReport) -> str:
    return link.condition or link.problem


def _by_role(member: FleetMember) -> tuple[int, str]:
    return _ROLES[member.record.view.role], member.record.view.worker_id


def _worst_first(entry: tuple[str, LinkReport]) -> tuple[bool, bool]:
    """Else in the order of their senders."""
    return not entry[1].broken, not _problem(entry[1])


def _cut(text: str) -> str:
    return text[:MAX_CHARACTERS]
