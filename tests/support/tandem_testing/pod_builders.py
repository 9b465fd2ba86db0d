"""Pods of a ModelService and what they say, for tests of the operator's telemetry."""

from typing import Any

from tandem_operator.telemetry.pod_metrics import GatewayFigures, GatewayTotals, WorkerFigures
from tandem_operator.telemetry.pods import PodSeen

PORTS = {"health": 9090, "http": 8000, "admin": 8001}


def pod(name: str, role: Any = "decode", **changes: Any) -> PodSeen:
    """A ready pod of revision r1; its uid is its name."""
    values = {"name": name, "uid": name, "ip": "10.0.0.1", "role": role, "revision": "r1", "ready": True}
    return PodSeen(**{**values, "ports": PORTS, **changes})


def worker(serves: Any = "decode", **changes: Any) -> WorkerFigures:
    """Idle: 1000 tokens/s, 10 places, 100 pages."""
    values: dict[str, Any] = {
        "draining": False,
        "age_s": 0.5,
        "running": 0,
        "waiting": 0,
        "transferring": 0,
        "inflight": 0,
        "leaving": 0,
        "waiting_tokens": 0,
        "oldest_wait_s": 0,
        "places": 10,
        "tokens_per_s": 1000,
        "pages": 100,
        "used_pages": 0,
    }
    return WorkerFigures(serves=serves, **{**values, **changes})


def gateway(
    *, answering: float = 1, waiting: float = 0, held: float = 0, tokens: float = 0, oldest: float = 0, **totals: float
) -> GatewayFigures:
    """A gateway with these totals since its start. It has finished requests unless told otherwise."""
    return GatewayFigures(
        answering=answering,
        waiting=waiting,
        held=held,
        waiting_tokens=tokens,
        oldest_wait_s=oldest,
        totals=GatewayTotals(**totals),
    )
