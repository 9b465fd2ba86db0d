"""The fleet and this gateway as JSON, for the console: numbers and names, no addresses.

Counters are totals since a worker's start; what is per second is for the viewer to work out from two documents.
Bounded: of a fleet larger than a page can show the rest is a number.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

import msgspec

from tandem_engine.config import Role
from tandem_engine.messages.engine_stats import LinkReport
from tandem_services.common.health import Health
from tandem_services.gateway.console.traffic import Traffic
from tandem_services.router.figures import Figures, read_figures
from tandem_services.router.fleet import FleetMember, FleetView
from tandem_services.router.keys import LEASE_MS

VERSION = version("tandem")
MAX_WORKERS_SHOWN = 256
MAX_LINKS_SHOWN = 512
MAX_CHARACTERS = 200
"""Of any text: what stands in Redis is not to be trusted with more."""

SUSPECT = "suspect"
"""State of a worker that this gateway has lost its connection to, whatever the registry says."""

_ROLES = {role: place for place, role in enumerate(Role)}


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as it reports itself."""

    worker_id: str
    incarnation: str
    role: str
    model: str
    state: str
    """ready, standby, draining, paused, stalled or suspect."""
    page_size: int
    context_length: int
    queue_tokens: float
    """Prompt tokens not yet computed."""
    sequences: float
    max_sequences: float
    prefill_tokens_per_s: float
    decode_step_s: float
    figures: Figures | None
    """None when what it says of itself makes no sense."""


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The way KV takes from one worker to another, as the sender has measured it. 0: not measured."""

    source: str
    target: str
    transport: str
    bytes_per_s: float
    latency_s: float
    age_s: float
    broken: bool
    trouble: str
    """What is wrong with it; "" when nothing is."""


class GatewayRow(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway that answers. Another one has requests of its own."""

    version: str
    clusters: tuple[str, ...]
    """Of its models' fleets."""
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
    """Since Redis last told who there is; of several fleets the longest."""
    gateway: GatewayRow
    workers: tuple[WorkerRow, ...]
    workers_total: int
    links: tuple[LinkRow, ...]
    links_total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayFigures:
    """Where the gateway's own figures come from. Each is called for every document."""

    health: Health
    running: Callable[[], int]
    waiting: Callable[[], int]
    traffic: Callable[[], Traffic]


class ViewedFleet(NamedTuple):
    """One model's, as its router sees it."""

    cluster: str
    look: Callable[[], FleetView]
    """From memory."""


def fleet_document(fleets: Sequence[ViewedFleet], gateway: GatewayFigures) -> FleetDocument:
    """All fleets of a gateway as one: their workers say which model they have."""
    views = [fleet.look() for fleet in fleets]
    age_s = max(view.age_s for view in views)
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
            draining=gateway.health.draining,
            running=gateway.running(),
            waiting=gateway.waiting(),
            traffic=gateway.traffic(),
        ),
        workers=tuple(_worker(member) for member in members[:MAX_WORKERS_SHOWN]),
        workers_total=len(members),
        links=tuple(_link(source, each) for source, each in links[:MAX_LINKS_SHOWN]),
        links_total=len(links),
    )


def _worker(member: FleetMember) -> WorkerRow:
    record = member.record
    view, load = record.view, record.load
    return WorkerRow(
        worker_id=_cut(view.worker_id),
        incarnation=_cut(view.incarnation),
        role=view.role.value,
        model=_cut(view.model),
        state=SUSPECT if member.suspect else record.state.value,
        page_size=view.page_size,
        context_length=view.context_length,
        queue_tokens=load.queue_tokens,
        sequences=load.sequences,
        max_sequences=load.max_sequences,
        prefill_tokens_per_s=load.prefill_rate,
        decode_step_s=load.step_s,
        figures=read_figures(record.details),
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
        trouble=_cut(_trouble(link)),
    )


def _trouble(link: LinkReport) -> str:
    return link.condition or link.problem


def _by_role(member: FleetMember) -> tuple[int, str]:
    return _ROLES[member.record.view.role], member.record.view.worker_id


def _worst_first(entry: tuple[str, LinkReport]) -> tuple[bool, bool]:
    """Else in the order of their senders."""
    return not entry[1].broken, not _trouble(entry[1])


def _cut(text: str) -> str:
    return text[:MAX_CHARACTERS]
