"""What pods say of themselves on `/metrics`, as far as people are shown it."""

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

WORKER = "tandem_worker_"
GATEWAY = "tandem_gateway_"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """A worker."""

    serves: str
    """Role that routers use it in."""
    offered: bool
    """Routers may choose it."""
    draining: bool
    running: int
    waiting: int
    waiting_tokens: int
    oldest_wait_s: float | None
    """None: it does not tell."""
    moving: int
    """Sequences whose KV comes or goes."""
    kv_usage: float
    """Share of the KV pages that is in use, 0 to 1."""
    kv_pages: int
    prefill_tokens_per_s: float
    decode_step_s: float
    standby: bool = False
    """Its revision has not been tried yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayFigures:
    """A gateway."""

    running: int
    waiting: int
    waiting_tokens: int | None
    """None: it does not tell, as with the next."""
    oldest_wait_s: float | None
    ready: bool = True


class Exposition:
    """One answer of `/metrics`. Raises `ValueError` for what is none."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def total(self, name: str) -> float:
        """Of all series; 0 when there is none."""
        return sum(value for _, value in self._samples.get(name, ()))

    def known(self, name: str) -> float | None:
        """The same, None when there is none."""
        return self.total(name) if name in self._samples else None

    def label(self, name: str, label: str) -> str:
        """Of the series that is 1."""
        return next((labels.get(label, "") for labels, value in self._samples.get(name, ()) if value == 1.0), "")


def worker_figures(text: str) -> WorkerFigures:
    """Raises `ValueError`."""
    said = Exposition(text)

    def count(name: str) -> int:
        return int(said.total(WORKER + name))

    return WorkerFigures(
        serves=said.label(f"{WORKER}role", "role"),
        offered=count("offered") == 1,
        draining=count("draining") == 1,
        standby=count("standby") == 1,
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting") + count("num_requests_swapped"),
        waiting_tokens=count("waiting_prompt_tokens"),
        oldest_wait_s=said.known(f"{WORKER}oldest_wait_seconds"),
        moving=count("num_requests_transferring") + count("num_requests_inflight"),
        kv_usage=said.total(f"{WORKER}kv_cache_usage_perc"),
        kv_pages=count("kv_pages"),
        prefill_tokens_per_s=said.total(f"{WORKER}prefill_tokens_per_second"),
        decode_step_s=said.total(f"{WORKER}decode_step_seconds"),
    )


def gateway_figures(text: str) -> GatewayFigures:
    """Raises `ValueError`."""
    said = Exposition(text)
    tokens = said.known(f"{GATEWAY}waiting_prompt_tokens")
    return GatewayFigures(
        running=int(said.total(f"{GATEWAY}num_requests_running")),
        waiting=int(said.total(f"{GATEWAY}num_requests_waiting")),
        waiting_tokens=None if tokens is None else int(tokens),
        oldest_wait_s=said.known(f"{GATEWAY}oldest_wait_seconds"),
    )
