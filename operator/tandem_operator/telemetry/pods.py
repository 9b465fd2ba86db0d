"""Pods of a ModelService as the autoscaler sees them, and reading their metrics, or progress, over HTTP.

All pods are read concurrently, bounded in time, bytes and number. A pod is not trusted to answer or to end its answer:
responses are cut off at `MAX_BYTES`, and redirects are not followed, so that a pod cannot direct the operator to
another host.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from tandem_engine.base.addresses import Address
from tandem_operator.api.types import RoleName
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL
from tandem_operator.planning.model_cache import ProgressReading
from tandem_operator.telemetry.exposition import Exposition, UnusableFiguresError
from tandem_operator.telemetry.pod_metrics import Figures, GatewayFigures, WorkerFigures

PodRole = Literal["prefill", "decode", "gateway"]
COMPONENT_LABEL = "app.kubernetes.io/component"

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation: of the pods of one ReplicaSet the cheapest go first."""

ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSeen:
    """One pod that has not ended."""

    name: str
    """A worker's is its name in the registry, too."""
    uid: str
    ip: str
    """Empty until it has one."""
    role: PodRole
    """Of its Deployment. What a worker serves as may have been flipped since: that is in its metrics alone."""
    revision: str = ""
    """Of a worker."""
    ready: bool = False
    standby: bool = False
    """A worker that would be ready if its revision had been tried (`telemetry.worker_control`)."""
    terminating: bool = False
    ports: Mapping[str, int] = field(default_factory=dict)
    """By the names that its containers give them."""
    deletion_cost: int = 0

    @staticmethod
    def of(pod: Mapping[str, Any]) -> "PodSeen | None":
        """From the API's own JSON. None for pods that have ended, and for those that are neither worker nor gateway."""
        metadata, status = pod["metadata"], pod.get("status", {})
        role = _role(metadata.get("labels", {}))
        if role is None or status.get("phase") in ENDED:
            return None
        return PodSeen(
            name=metadata["name"],
            uid=metadata["uid"],
            ip=status.get("podIP", ""),
            role=role,
            revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
            ready=any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ())),
            terminating=metadata.get("deletionTimestamp") is not None,
            ports=_ports(pod.get("spec", {})),
            deletion_cost=_deletion_cost(metadata.get("annotations", {})),
        )

    @property
    def usable(self) -> bool:
        """Whether a canary can go through it."""
        return (self.ready or self.standby) and not self.terminating

    @property
    def worker_role(self) -> RoleName | None:
        """None of a gateway."""
        return None if self.role == "gateway" else self.role

    def url(self, port: str, path: str) -> str | None:
        """http:// address of `path` at the port of that name; None while it cannot be polled."""
        number = self.ports.get(port)
        if not self.ip or number is None:
            return None
        return Address(self.ip, number).url(path)


def _role(labels: Mapping[str, str]) -> PodRole | None:
    match labels.get(COMPONENT_LABEL), labels.get(ROLE_LABEL):
        case "gateway", _:
            return "gateway"
        case "worker", "prefill":
            return "prefill"
        case "worker", "decode":
            return "decode"
    return None


def _ports(spec: Mapping[str, Any]) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for container in spec.get("containers", ())
        for port in container.get("ports", ())
        if "name" in port
    }


def _deletion_cost(annotations: Mapping[str, str]) -> int:
    try:
        return int(annotations.get(DELETION_COST, "0"))
    except ValueError:
        # Set by another writer; the ReplicaSet controller takes it for 0 as well.
        return 0


ANSWER_S = 3.0
"""Less than a period of the autoscaler, so that one pod that hangs does not delay a decision."""

MAX_BYTES = 4 << 20
AT_ONCE = 32
HEALTH_PORT = "health"
ADMIN_PORT = "admin"


def pod_client() -> httpx.AsyncClient:
    """For pods alone: no proxy of the environment, no redirects, no cookies to speak of."""
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    return httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=ANSWER_S, limits=limits)


async def fetch_figures(
    client: httpx.AsyncClient, pods: Sequence[PodSeen], model: str = ""
) -> dict[str, Figures | str]:
    """By uid: the metrics of each pod, or in one sentence why there are none. Pods without an address are left out.

    `model`: of gateways that have several, the one whose metrics are of interest.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(pod: PodSeen, url: str) -> Figures | str:
        async with slots:
            return await _figures(client, pod, url, model)

    asked = [(pod, url) for pod in pods if (url := metrics_url(pod)) is not None]
    answers = await asyncio.gather(*(ask(pod, url) for pod, url in asked))
    return {pod.uid: answer for (pod, _), answer in zip(asked, answers, strict=True)}


def metrics_url(pod: PodSeen) -> str | None:
    return pod.url(ADMIN_PORT if pod.role == "gateway" else HEALTH_PORT, "/metrics")


async def _figures(client: httpx.AsyncClient, pod: PodSeen, url: str, model: str) -> Figures | str:
    try:
        async with asyncio.timeout(ANSWER_S):
            text = await bounded_text(client, url, headers={})
        exposition = Exposition.parse(text)
        return GatewayFigures.of(exposition, model) if pod.role == "gateway" else WorkerFigures.of(exposition)
    except TimeoutError:
        return f"it does not answer within {ANSWER_S:.0f} s"
    except httpx.HTTPError as error:
        return f"it cannot be reached: {error!r}"
    except UnusableFiguresError as error:
        return str(error)


async def bounded_text(client: httpx.AsyncClient, url: str, *, headers: Mapping[str, str]) -> str:
    """Body of a 200. Raises `UnusableFiguresError` for everything else that comes, `httpx.HTTPError` when none does."""
    async with client.stream("GET", url, headers=headers) as response:
        if response.status_code != 200:
            raise UnusableFiguresError(f"it answers with status {response.status_code}")
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_BYTES:
                raise UnusableFiguresError(f"its answer has more than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableFiguresError("its answer is not UTF-8") from error


# The progress of a pod that downloads for a ModelCache, over HTTP.
#
# It is shown and decides nothing: which commit is whole, and why one is not, is in the pod's status.

PROGRESS_PATH = "/progress"


async def fetch_progress(client: httpx.AsyncClient, url: str) -> ProgressReading | None:
    """None without an answer that can be used."""
    try:
        async with asyncio.timeout(ANSWER_S):
            text = await bounded_text(client, url, headers={})
        return msgspec.json.decode(text, type=ProgressReading)
    except (TimeoutError, httpx.HTTPError, UnusableFiguresError, msgspec.DecodeError, RecursionError):
        return None
