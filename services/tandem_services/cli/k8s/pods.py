"""Pods of ModelServices: their list, their state, and the metrics that they return."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem_engine.base.logs import quoted
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL
from tandem_operator.builders.worker import FOLLOWER
from tandem_operator.planning.pod_failure import pod_failure
from tandem_services.cli.k8s.cluster import ANSWER_S, Access, Cluster, Object, pod_client
from tandem_services.common.errors import RemoteError

WORKER_SERIES = "tandem_worker_"
GATEWAY_SERIES = "tandem_gateway_"


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
    """None: not reported."""
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
    """None: not reported, as with the next."""
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
    series = Exposition(text)

    def count(name: str) -> int:
        return int(series.total(WORKER_SERIES + name))

    return WorkerFigures(
        serves=series.label(f"{WORKER_SERIES}role", "role"),
        offered=count("offered") == 1,
        draining=count("draining") == 1,
        standby=count("standby") == 1,
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting") + count("num_requests_swapped"),
        waiting_tokens=count("waiting_prompt_tokens"),
        oldest_wait_s=series.known(f"{WORKER_SERIES}oldest_wait_seconds"),
        moving=count("num_requests_transferring") + count("num_requests_inflight"),
        kv_usage=series.total(f"{WORKER_SERIES}kv_cache_usage_perc"),
        kv_pages=count("kv_pages"),
        prefill_tokens_per_s=series.total(f"{WORKER_SERIES}prefill_tokens_per_second"),
        decode_step_s=series.total(f"{WORKER_SERIES}decode_step_seconds"),
    )


def gateway_figures(text: str) -> GatewayFigures:
    """Raises `ValueError`."""
    series = Exposition(text)
    tokens = series.known(f"{GATEWAY_SERIES}waiting_prompt_tokens")
    return GatewayFigures(
        running=int(series.total(f"{GATEWAY_SERIES}num_requests_running")),
        waiting=int(series.total(f"{GATEWAY_SERIES}num_requests_waiting")),
        waiting_tokens=None if tokens is None else int(tokens),
        oldest_wait_s=series.known(f"{GATEWAY_SERIES}oldest_wait_seconds"),
    )


COMPONENT_LABEL = "app.kubernetes.io/component"
WORKER, GATEWAY = "worker", "gateway"

LEADER_ANNOTATION = "leaderworkerset.sigs.k8s.io/leader-name"
"""The LeaderWorkerSet controller's, on the pods of a group that are not its leader."""

HEALTH_PORT = "health"
ADMIN_PORT = "admin"
HTTP_PORT = "http"
ASKED_AT_ONCE = 8

MAX_ASKED = 128
"""Of one look. Those beyond are shown without figures."""

MAX_BYTES = 4 << 20
Figures = WorkerFigures | GatewayFigures

PodAnswer = Figures | str
"""Or in a few words why a pod returns nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod as in the API server."""

    name: str
    namespace: str
    service: str
    component: str
    """worker, follower, gateway, redis."""
    leader: str
    """Of a follower: the pod that is the worker which this one is a part of; "" of all others."""
    role: str
    """What a worker was made for."""
    revision: str
    ready: bool
    state: str
    """One word: Ready, Pending, Starting, Terminating, CrashLoopBackOff …"""
    failure: str
    """A sentence about what keeps it from being ready; "" when nothing is known."""
    node: str
    restarts: int
    created: str
    """RFC 3339."""

    @staticmethod
    def of(pod: Object) -> "Pod":
        metadata, status = pod["metadata"], pod.get("status", {})
        labels = metadata.get("labels", {})
        component = labels.get(COMPONENT_LABEL, "")
        containers = status.get("containerStatuses", ())
        state, failure = _state(pod)
        return Pod(
            name=metadata["name"],
            namespace=metadata["namespace"],
            service=labels.get(SERVICE_LABEL, ""),
            component=component,
            leader=metadata.get("annotations", {}).get(LEADER_ANNOTATION, "") if component == FOLLOWER else "",
            role=labels.get(ROLE_LABEL, ""),
            revision=labels.get(REVISION_LABEL, ""),
            ready=state == "Ready",
            state=state,
            failure=failure,
            node=pod["spec"].get("nodeName", ""),
            restarts=sum(one.get("restartCount", 0) for one in containers),
            created=metadata.get("creationTimestamp", ""),
        )

    def age_s(self, now: datetime) -> float:
        return (now - datetime.fromisoformat(self.created)).total_seconds() if self.created else 0.0


def now() -> datetime:
    return datetime.now(UTC)


def pods_of(cluster: Cluster, service: Object) -> list[Object]:
    metadata = service["metadata"]
    return cluster.pods(metadata["namespace"], f"{SERVICE_LABEL}={metadata['name']}")


def own_pod(cluster: Cluster, name: str) -> Object:
    """The pod of this name. Raises `RemoteError` when it is none of a ModelService."""
    pod = cluster.pod(name)
    if SERVICE_LABEL not in pod["metadata"].get("labels", {}):
        raise RemoteError(f"pod {quoted(name)} belongs to no ModelService: `tandem k8s status` names those that do")
    return pod


def ask(access: Access, pods: Iterable[Object]) -> dict[str, PodAnswer]:
    """What workers and gateways say, by the pod's name. Bounded in time, in number and in bytes; never raises."""
    asked = [pod for pod in pods if Pod.of(pod).component in (WORKER, GATEWAY) and runs(pod)][:MAX_ASKED]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        answers = threads.map(lambda pod: _figures(access, pod), asked)
        return {pod["metadata"]["name"]: answer for pod, answer in zip(asked, answers, strict=True)}


def workers_among(figures: Mapping[str, PodAnswer]) -> dict[str, WorkerFigures]:
    return {name: answer for name, answer in figures.items() if isinstance(answer, WorkerFigures)}


def _figures(access: Access, pod: Object) -> PodAnswer:
    worker = Pod.of(pod).component == WORKER
    try:
        with pod_client(access, pod, HEALTH_PORT if worker else ADMIN_PORT) as client:
            text = _bounded(client)
        return worker_figures(text) if worker else gateway_figures(text)
    except (httpx.HTTPError, LookupError, ValueError) as error:
        return str(error) or type(error).__name__


def _bounded(client: httpx.Client) -> str:
    """Raises `ValueError` for what cannot be an exposition, or does not end."""
    deadline = monotonic() + ANSWER_S
    with client.stream("GET", "/metrics") as response:
        if response.status_code != 200:
            raise ValueError(f"/metrics answers {response.status_code}")
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > MAX_BYTES or monotonic() > deadline:
                raise ValueError(f"/metrics has more than {MAX_BYTES >> 20} MiB, or takes more than {ANSWER_S:.0f} s")
    return data.decode("utf-8", "replace")


def runs(pod: Object) -> bool:
    """Its containers can be queried."""
    return bool(pod.get("status", {}).get("phase") == "Running")


def _state(pod: Object) -> tuple[str, str]:
    status = pod.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating", ""
    if conditions.get("Ready", {}).get("status") == "True":
        return "Ready", ""
    failure = quoted(next(pod_failure(status), ""))
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason")
        if reason not in (None, "ContainerCreating", "PodInitializing"):
            return reason, failure or quoted(waiting.get("message", ""))
    if conditions.get("PodScheduled", {}).get("status") == "False":
        return "Unschedulable", failure
    phase = status.get("phase", "Pending")
    return ("Starting" if phase == "Running" else phase), failure
