"""The fleet as one gateway sees it, for people: the view that routing keeps, so looking costs no call."""

from dataclasses import dataclass

from tandem_services.router.registry import WorkerRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMember:
    record: WorkerRecord
    suspect: bool
    """This gateway has lost its connection to it and does not choose it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetView:
    """What routing goes by now."""

    members: tuple[FleetMember, ...]
    age_s: float
    """Since Redis last told who there is; longer than a few heartbeats: Redis is away, and the last view decides."""
