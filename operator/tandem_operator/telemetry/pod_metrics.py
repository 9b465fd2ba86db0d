"""The numbers of one pod that the operator uses, from its `/metrics`; incomplete metrics are rejected."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from tandem_engine.base.release import UNSTATED
from tandem_operator.api.types import RoleName
from tandem_operator.telemetry.exposition import GATEWAY, RELEASE_NAME, WORKER, Exposition
from tandem_operator.telemetry.latency_metrics import LatencyFactors, LatencyTotals, StepFit

MAX_RELEASE = 1_000_000
"""Greater numbers were not written by a release."""

MAX_PROCESSES = 64
"""More than a gateway has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """A worker whose engine has reported."""

    serves: RoleName | None
    """The role; None: both, which the operator never sets."""
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
    """Of those that run, the ones that are to migrate."""
    waiting_tokens: float
    oldest_wait_s: float
    places: float
    tokens_per_s: float
    pages: float
    used_pages: float
    slow_links: Mapping[str, str] = field(default_factory=dict)
    """Links that are slower than the service expects: peer → transport."""
    release: int = UNSTATED
    """Of its image (`base.release`)."""
    step_base_s: float = 0.0
    step_fit: StepFit | None = None

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
            release=_release(exposition),
            step_base_s=exposition.sum_or_zero(WORKER + "step_base_seconds"),
            step_fit=StepFit.of(exposition),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayTotals:
    """Since its start."""

    choices: float = 0.0
    requested_tokens: float = 0.0
    predicted_tokens: float = 0.0
    first_token_s: float = 0.0
    first_tokens: float = 0.0
    finished_s: float = 0.0
    finished: float = 0.0

    def since(self, before: "GatewayTotals") -> "GatewayTotals":
        """The increase; the whole value when any of them has become less: the pod has restarted in the meantime."""
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
    release: int = UNSTATED
    """Of its image."""
    latency: LatencyTotals = field(default_factory=LatencyTotals)
    factors: LatencyFactors | None = None
    """None before a request was predicted."""
    processes: int = 1
    """Whose counts are sums in its metrics."""

    @staticmethod
    def of(exposition: Exposition, model: str = "") -> "GatewayFigures":
        """`model`: of a gateway that has several; nothing is answered before it has this one. Raises
        `UnusableFiguresError`.
        """
        release = _release(exposition)
        processes = exposition.sum_or_zero(GATEWAY + "processes")
        if model:
            # The gateway itself is known to report by now.
            exposition.sum(GATEWAY + "models")
            exposition = exposition.of_model(model)
            if not exposition.samples:
                return GatewayFigures.none(release)

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
                requested_tokens=value("asked_prompt_tokens_total"),
                predicted_tokens=value("predicted_cached_tokens_total"),
                first_token_s=value("time_to_first_token_seconds_sum"),
                first_tokens=value("time_to_first_token_seconds_count"),
                finished_s=value("e2e_request_latency_seconds_sum"),
                finished=value("e2e_request_latency_seconds_count"),
            ),
            release=release,
            latency=LatencyTotals.of(exposition),
            factors=LatencyFactors.of(exposition),
            processes=int(min(max(1.0, processes), MAX_PROCESSES)),
        )

    @staticmethod
    def none(release: int = UNSTATED) -> "GatewayFigures":
        """Of a gateway that does not have the model."""
        return GatewayFigures(
            answering=0.0,
            waiting=0.0,
            held=0.0,
            waiting_tokens=0.0,
            oldest_wait_s=0.0,
            totals=GatewayTotals(),
            release=release,
        )


Figures = WorkerFigures | GatewayFigures


def _role(exposition: Exposition) -> RoleName | None:
    held = {sample.labels.get("role") for sample in exposition.of(WORKER + "role") if sample.value > 0}
    return "prefill" if held == {"prefill"} else "decode" if held == {"decode"} else None


def _release(exposition: Exposition) -> int:
    found = exposition.of(RELEASE_NAME)
    value = found[0].value if found else 0.0
    return int(value) if 0 <= value < MAX_RELEASE else UNSTATED


def _slow_links(exposition: Exposition) -> dict[str, str]:
    carried = {
        sample.labels.get("peer", ""): sample.labels.get("transport", "")
        for sample in exposition.of("tandem_link_bytes_per_second")
    }
    slow = [sample.labels.get("peer", "") for sample in exposition.of("tandem_link_conditions") if sample.value > 0]
    return {peer: carried.get(peer, "unknown") for peer in slow}
