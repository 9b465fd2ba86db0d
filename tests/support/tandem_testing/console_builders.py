"""A fleet to look at, without workers: what the router would say of one, moved by hand."""

from dataclasses import dataclass, field, replace
from typing import Any

from tandem_engine.base.names import LinkTransport
from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport
from tandem_services.router.membership import FleetMember, FleetView
from tandem_services.router.registry import WorkerState
from tandem_services.router.starting import StartingWorker
from tandem_testing.router_builders import MODEL, make_load, make_record

FIGURES: dict[str, str] = {
    "running": "3",
    "waiting": "1",
    "transferring": "1",
    "total_pages": "1000",
    "free_pages": "250",
    "evictable_pages": "400",
    "prompt_tokens_total": "1000",
    "cached_tokens_total": "600",
    "host_cached_tokens_total": "100",
    "output_tokens_total": "5000",
    "output_tokens_per_s": "212.5",
    "transfers_total": "40",
    "transfer_bytes_total": "50000000",
}
"""As they come from Redis: text."""


def member(
    name: str,
    role: Role = Role.BOTH,
    *,
    state: WorkerState = WorkerState.READY,
    suspect: bool = False,
    skewed: bool = False,
    links: tuple[LinkReport, ...] = (),
    figures: dict[str, str] | None = None,
    **changes: Any,
) -> FleetMember:
    record = make_record(name, role, state=state, links=links, load=make_load(queue_tokens=40, sequences=4), **changes)
    return FleetMember(record=replace(record, details=FIGURES | (figures or {})), suspect=suspect, skewed=skewed)


def starting(name: str, role: Role = Role.BOTH, **changes: Any) -> StartingWorker:
    fields = {"phase": "weights", "done": 1 << 30, "total": 4 << 30, "unit": "bytes", "seconds": 12.3}
    return StartingWorker(worker_id=name, incarnation=f"{name}@1", role=role, model=MODEL, **{**fields, **changes})


def link(peer: str, **changes: Any) -> LinkReport:
    fields = {"bytes_per_s": 1.2e9, "latency_s": 0.0004, "transport": LinkTransport.SHM, "age_s": 3.0}
    return LinkReport(peer=f"{peer}@1", **{**fields, **changes})


@dataclass(kw_only=True)
class ScriptedFleet:
    """What `Router.fleet` answers."""

    members: list[FleetMember] = field(default_factory=list)
    age_s: float = 0.4
    asked: int = 0
    starting: list[StartingWorker] = field(default_factory=list)

    def __call__(self) -> FleetView:
        self.asked += 1
        return FleetView(members=tuple(self.members), age_s=self.age_s, starting=tuple(self.starting))
