"""Requests to the API server: the few verbs that the operator needs, as plain JSON.

The official client handles access to clusters (kubeconfig, in-cluster tokens and their renewal, TLS, proxies); its
asyncio variant never blocks kopf's loop. Its models are not used: manifests are JSON already, and custom resources have
none.

Every write first calls `may_write`, which raises when this process is not the leader: a write that was planned before
leadership was lost is not sent after it [one-leader].
"""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException

from tandem_operator.builders.containers import Manifest
from tandem_operator.controller.store import (
    BUDGETS,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    HTTP_ROUTE,
    INFERENCE_POOL,
    JOB,
    LEADER_WORKER_SET,
    MODEL_ADAPTER,
    MODEL_CACHE,
    MODEL_GATEWAY,
    MODEL_SERVICE,
    NETWORK_POLICY,
    POD,
    POD_MONITOR,
    SERVICE,
    WORKER_POOL,
    Kind,
    kind_of,
)
from tandem_operator.planning.observed import Ref
from tandem_operator.settings import ClusterApis, in_cluster

FIELD_MANAGER = "tandem-operator"
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30.0)

PAGE = 500
"""Objects per answer of a list."""

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
_BUSY = (429, 503)
_MAX_ATTEMPTS = 4
_MAX_PAUSE_S = 10.0


class ApiError(Exception):
    """An answer of 400 or more, or none at all (`status` 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        head = f"{status} {reason}".strip() if status else reason
        super().__init__(f"{head}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def refused(self) -> bool:
        """Another attempt with the same request gets the same answer: admission, quota, a missing right, or a field
        that the API server does not know. Server-side apply answers the last with 500.
        """
        return self.status in (400, 403, 422, 500)

    @property
    def conflict(self) -> bool:
        """Another writer was faster, or it is not the intended object."""
        return self.status == 409

    @property
    def absent(self) -> bool:
        return self.status == 404


class Meter(Protocol):
    """Counts requests that change something."""

    def wrote(self, verb: str, kind: str) -> None: ...


class NoCredentialsError(Exception):
    """Neither a service account nor a usable kubeconfig."""


@asynccontextmanager
async def connected() -> AsyncIterator[ApiClient]:
    """A client with the credentials of the pod, or else those of $KUBECONFIG or ~/.kube/config, while the block lasts.

    Raises `NoCredentialsError`.
    """
    configuration = Configuration()
    try:
        if in_cluster():
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise NoCredentialsError(f"no credentials for a cluster: {error}; set KUBECONFIG") from error
    # Connections for all workers of the queue at once; more would only be queued by the API server.
    configuration.connection_pool_maxsize = 32
    client = ApiClient(configuration)
    try:
        yield client
    finally:
        await client.close()  # type: ignore[no-untyped-call]


class Cluster:
    """One API server. `may_write` is called before each request that changes something."""

    def __init__(
        self,
        client: ApiClient,
        meter: Meter,
        may_write: Callable[[], None],
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._meter = meter
        self._may_write = may_write
        self._pause = pause

    async def get(self, ref: Ref, namespace: str) -> Manifest | None:
        """None when there is no such object."""
        try:
            return await self._request("GET", kind_of(ref.api_version, ref.kind).path(namespace, ref.name))
        except ApiError as error:
            if error.absent:
                return None
            raise

    async def list_all(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[list[Manifest], int]:
        """All that match the label selector, and the version of the list; in pages, restarted when one is too old."""
        while True:
            try:
                return await self._pages(kind, namespace, selector)
            except ApiError as error:
                # "410 Gone": the continuation has expired.
                if error.status != 410:
                    raise

    async def _pages(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[Manifest], int]:
        items: list[Manifest] = []
        token = ""
        while True:
            query = {"limit": str(PAGE), "labelSelector": selector, "continue": token}
            answer = await self._request(
                "GET", kind.path(namespace), {key: text for key, text in query.items() if text}
            )
            for item in answer.get("items") or ():
                # Items of a list do not say what they are.
                items.append({"apiVersion": kind.api_version, "kind": kind.name, **item})
            token = answer["metadata"].get("continue") or ""
            if not token:
                return items, int(answer["metadata"]["resourceVersion"])

    async def apply(self, manifest: Manifest, *, subresource: str = "", dry_run: bool = False) -> Manifest:
        """Server-side apply; fields of ours that others have taken are taken back. The object as it is afterwards.

        `dry_run`: the API server checks the request as if it were sent without, and keeps nothing.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true", **_dry(dry_run)}
        return await self._write("apply", kind, "PATCH", path, query, manifest, APPLY)

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Raises `ApiError` (409) when it is there already."""
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        path = kind.path(manifest["metadata"]["namespace"])
        query = {"fieldManager": FIELD_MANAGER, **_dry(dry_run)}
        return await self._write("create", kind, "POST", path, query, manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        """As a whole; with a `resourceVersion` only without another write since."""
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._write("replace", kind, "PUT", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def scale(self, ref: Ref, namespace: str, replicas: int, *, dry_run: bool = False) -> None:
        """Through the scale subresource."""
        kind = kind_of(ref.api_version, ref.kind)
        path = kind.path(namespace, ref.name, "scale")
        body = {"spec": {"replicas": replicas}}
        query = {"fieldManager": FIELD_MANAGER, **_dry(dry_run)}
        await self._write("scale", kind, "PATCH", path, query, body, MERGE)

    async def merge(self, ref: Ref, namespace: str, body: Manifest) -> Manifest:
        """Merge patch; with a `resourceVersion` in `body` only without another write since."""
        kind = kind_of(ref.api_version, ref.kind)
        path = kind.path(namespace, ref.name)
        return await self._write("patch", kind, "PATCH", path, {"fieldManager": FIELD_MANAGER}, body, MERGE)

    async def delete(self, ref: Ref, namespace: str, uid: str, *, dry_run: bool = False) -> bool:
        """Delete the object of that `uid` and, in the background, what it owns. False if it did not exist any more.

        Raises `ApiError` (409) where another object has the name.
        """
        kind = kind_of(ref.api_version, ref.kind)
        body: Manifest = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._write("delete", kind, "DELETE", kind.path(namespace, ref.name), _dry(dry_run), body)
        except ApiError as error:
            if error.absent:
                return False
            raise
        return True

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server has this kind, in this version."""
        root = f"/api/{kind.api_version}" if "/" not in kind.api_version else f"/apis/{kind.api_version}"
        try:
            answer = await self._request("GET", root)
        except ApiError as error:
            if error.absent:
                return False
            raise
        return any(one["name"] == kind.plural for one in answer.get("resources", ()))

    async def _write(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Manifest,
        content: str = "application/json",
    ) -> Manifest:
        self._may_write()
        if "dryRun" not in query:
            self._meter.wrote(verb, kind.name)
        return await self._request(method, path, query, body, content, before_attempt=self._may_write)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content: str = "application/json",
        *,
        before_attempt: Callable[[], None] = lambda: None,
    ) -> Manifest:
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            before_attempt()
            status, retry_after, data = await self._once(method, target, body, content)
            if status < 400:
                parsed: Manifest = json.loads(data)
                return parsed
            if status not in _BUSY or attempt == _MAX_ATTEMPTS:
                raise _error(status, data)
            await self._pause(_pause_s(retry_after, attempt))
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, target: str, body: Manifest | None, content: str) -> tuple[int, str, bytes]:
        headers = {"Accept": "application/json", "Content-Type": content}
        try:
            request = await self._client.param_serialize(
                method, target, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            answer = await self._client.call_api(*request, _request_timeout=REQUEST_TIMEOUT)
            data: bytes = await answer.response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, type(error).__name__, str(error) or "no answer of the API server") from error
        return answer.status, answer.headers.get("Retry-After", ""), data


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _pause_s(retry_after: str, attempt: int) -> float:
    """As long as the API server requests, else longer each time; never in step with other clients."""
    asked = float(retry_after) if retry_after.isdecimal() else 0.25 * 2.0**attempt
    return min(_MAX_PAUSE_S, asked) * random.uniform(1.0, 1.25)


def _error(status: int, data: bytes) -> ApiError:
    try:
        answer: Any = json.loads(data)
        return ApiError(status, answer.get("reason", ""), answer.get("message", ""))
    except (ValueError, AttributeError):
        return ApiError(status, "", data[:200].decode(errors="replace"))


logger = logging.getLogger(__name__)
RETRY_S = 5.0


async def discover(cluster: Cluster) -> ClusterApis:
    """Optional interfaces. Raises `ApiError` when the API server does not answer."""
    budgets = [kind for kind in BUDGETS if await cluster.serves(kind)]
    return ClusterApis(
        pod_disruption_budget=(budgets or list(BUDGETS))[0].api_version,
        pod_monitors=await cluster.serves(POD_MONITOR),
        http_routes=await cluster.serves(HTTP_ROUTE),
        inference_pools=await cluster.serves(INFERENCE_POOL),
        leader_worker_sets=await cluster.serves(LEADER_WORKER_SET),
        model_adapters=await cluster.serves(MODEL_ADAPTER),
        model_caches=await cluster.serves(MODEL_CACHE),
    )


async def wait_for_cluster(cluster: Cluster, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> ClusterApis:
    """Waits for the API server and for the custom resources, saying what for; then as `discover`."""
    while True:
        try:
            ours = (MODEL_SERVICE, WORKER_POOL, MODEL_GATEWAY)
            missing = [kind.plural for kind in ours if not await cluster.serves(kind)]
            if not missing:
                return await discover(cluster)
            logger.warning("waiting for the CRDs of %s: kubectl apply -f charts/tandem/crds", " and ".join(missing))
        except ApiError as error:
            logger.warning("waiting for the API server: %s", error)
        await pause(RETRY_S)


def watched_kinds(apis: ClusterApis) -> tuple[Kind, ...]:
    """Everything that reconciles read or write, but Secrets, which are looked up by name."""
    budget = next(kind for kind in BUDGETS if kind.api_version == apis.pod_disruption_budget)
    offered = (
        (HTTP_ROUTE, apis.http_routes),
        (INFERENCE_POOL, apis.inference_pools),
        (POD_MONITOR, apis.pod_monitors),
        (LEADER_WORKER_SET, apis.leader_worker_sets),
        (MODEL_ADAPTER, apis.model_adapters),
        (MODEL_CACHE, apis.model_caches),
        (JOB, apis.model_caches),
        (CLAIM, apis.model_caches),
    )
    optional = [kind for kind, there in offered if there]
    ours = (MODEL_SERVICE, WORKER_POOL, MODEL_GATEWAY)
    return (*ours, CONFIG_MAP, DEPLOYMENT, POD, SERVICE, NETWORK_POLICY, budget, *optional)
