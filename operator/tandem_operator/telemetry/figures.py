"""What one pod says of itself, in numbers, from its `/metrics`. Figures that lack something are not made at all."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from tandem_operator.api.roles import RoleName
from tandem_operator.telemetry.exposition import GATEWAY, WORKER, Exposition


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """A worker whose engine has reported."""

    serves: RoleName | None
    """As what; None: as both, which the operator never asks for."""
    draining: bool
    age_s: float
    """Of the engine's report when it was read."""
    running: float
    waiting: float
    transferring: float
    """Sequences that wait for their KV from a prefill worker."""
    inflight: float
    """Sequences whose KV is being sent."""
    leaving: float
    """Of those that run, the ones that are to go on elsewhere."""
    waiting_tokens: float
    oldest_wait_s: float
    places: float
    tokens_per_s: float
    pages: float
    used_pages: float
    slow_links: Mapping[str, str] = field(default_factory=dict)
    """Links that are slower than the service expects: peer → transport."""

    @property
    def outstanding(self) -> float:
        """Requests that would have to move if it went away now."""
        return self.running + self.waiting + self.transferring + self.inflight

    @staticmethod
    def of(exposition: Exposition) -> "WorkerFigures":
        """Raises `UnusableFiguresError`."""

        def value(name: str) -> float:
            return exposition.sum(WORKER + name)

        pages = value("kv_pages")
        return WorkerFigures(
            serves=_role(exposition),
            draining=value("draining") > 0,
            age_s=value("stats_age_seconds"),
            running=value("num_requests_running"),
            waiting=value("num_requests_waiting") + value("num_requests_swapped"),
            transferring=value("num_requests_transferring"),
            inflight=value("num_requests_inflight"),
            leaving=value("num_requests_leaving"),
            waiting_tokens=value("waiting_prompt_tokens"),
            oldest_wait_s=value("oldest_wait_seconds"),
            places=value("max_running_requests"),
            tokens_per_s=value("prefill_tokens_per_second"),
            pages=pages,
            used_pages=max(0.0, pages - value("kv_pages_free") - value("kv_pages_evictable")),
            slow_links=_slow_links(exposition),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayTotals:
    """Since its start."""

    choices: float = 0.0
    asked_tokens: float = 0.0
    predicted_tokens: float = 0.0
    first_token_s: float = 0.0
    first_tokens: float = 0.0
    finished_s: float = 0.0
    finished: float = 0.0

    def since(self, before: "GatewayTotals") -> "GatewayTotals":
        """What was added; all there is when any of them has become less: it has started anew meanwhile."""
        names = [one.name for one in fields(self)]
        if any(getattr(self, name) < getattr(before, name) for name in names):
            return self
        return GatewayTotals(**{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayFigures:
    """A gateway: what it answers and what waits there now, and its totals."""

    answering: float
    """Clients' requests, those that wait included; canaries are none."""
    waiting: float
    held: float
    """Of them, those that no worker can take."""
    waiting_tokens: float
    oldest_wait_s: float
    totals: GatewayTotals

    @staticmethod
    def of(exposition: Exposition) -> "GatewayFigures":
        """Raises `UnusableFiguresError`."""

        def value(name: str) -> float:
            return exposition.sum(GATEWAY + name)

        return GatewayFigures(
            answering=value("num_requests_running"),
            waiting=value("num_requests_waiting"),
            held=value("num_requests_held"),
            waiting_tokens=value("waiting_prompt_tokens"),
            oldest_wait_s=value("oldest_wait_seconds"),
            totals=GatewayTotals(
                choices=value("choices_total"),
                asked_tokens=value("asked_prompt_tokens_total"),
                predicted_tokens=value("predicted_cached_tokens_total"),
                first_token_s=value("time_to_first_token_seconds_sum"),
                first_tokens=value("time_to_first_token_seconds_count"),
                finished_s=value("e2e_request_latency_seconds_sum"),
                finished=value("e2e_request_latency_seconds_count"),
            ),
        )


Figures = WorkerFigures | GatewayFigures


def _role(exposition: Exposition) -> RoleName | None:
    held = {sample.labels.get("role") for sample in exposition.of(WORKER + "role") if sample.value > 0}
    return "prefill" if held == {"prefill"} else "decode" if held == {"decode"} else None


def _slow_links(exposition: Exposition) -> dict[str, str]:
    carried = {
        sample.labels.get("peer", ""): sample.labels.get("transport", "")
        for sample in exposition.of("tandem_link_bytes_per_second")
    }
    slow = [sample.labels.get("peer", "") for sample in exposition.of("tandem_link_conditions") if sample.value > 0]
    return {peer: carried.get(peer, "unknown") for peer in slow}
