"""The newest known version of each relevant object of the cluster, by the service it belongs to.

    events of kopf's watches ─────┐
    responses to our own writes ──┼─▶ Store ─▶ view of one service ─▶ Observed
    full lists (`Resync`) ────────┘

Older versions never replace newer ones, so the three may arrive in any order, and a reconcile sees what the previous
one wrote. The next full list corrects what an interrupted watch has missed.

`Seen` is one object: the parts that the operator reads, and a fingerprint of what a manifest of ours can set (labels,
owners, annotations and spec). If fingerprint and manifest are unchanged, applying the manifest again would change
nothing. The fingerprint is compared with the API server's response to the apply, which has defaults filled in and
quantities in its own notation, so this module needs no rules for either.
"""

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from tandem_operator.api.model_adapter import ModelAdapterSpec, ModelAdapterStatus
from tandem_operator.api.model_cache import ModelCacheSpec, ModelCacheStatus
from tandem_operator.api.model_gateway import ModelGatewaySpec, ModelGatewayStatus
from tandem_operator.api.model_service import GROUP, VERSION, ModelServiceSpec, ModelServiceStatus
from tandem_operator.api.worker_pool import WorkerPoolStatus
from tandem_operator.builders.arguments import CHECK
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import CACHE_LABEL, GATEWAY_LABEL, SERVICE_LABEL
from tandem_operator.builders.worker import LEADER_WORKER_SETS
from tandem_operator.planning.adapters import AdapterAsk
from tandem_operator.planning.observed import Ref


class ServiceKey(NamedTuple):
    """A ModelService, a ModelGateway or a ModelCache by its name: what is queued, locked and looked up."""

    namespace: str
    name: str
    kind: str = "ModelService"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind in one version."""

    api_version: str
    name: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Of an object, of all of a namespace, or of all there are."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        within = f"/namespaces/{namespace}" if namespace is not None else ""
        return root + within + "".join(f"/{part}" for part in (self.plural, name, subresource) if part)

    def ref(self, name: str) -> Ref:
        return Ref(api_version=self.api_version, kind=self.name, name=name)

    @property
    def group(self) -> str:
        """Empty of the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


OURS = f"{GROUP}/{VERSION}"
MODEL_SERVICE = Kind(OURS, "ModelService", "modelservices")
WORKER_POOL = Kind(OURS, "WorkerPool", "workerpools")
MODEL_GATEWAY = Kind(OURS, "ModelGateway", "modelgateways")
MODEL_ADAPTER = Kind(OURS, "ModelAdapter", "modeladapters")
MODEL_CACHE = Kind(OURS, "ModelCache", "modelcaches")
JOB = Kind("batch/v1", "Job", "jobs")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
SECRET = Kind("v1", "Secret", "secrets")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
HTTP_ROUTE = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
INFERENCE_POOL = Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
LEADER_WORKER_SET = Kind(LEADER_WORKER_SETS, "LeaderWorkerSet", "leaderworkersets")

ROOTS = (MODEL_SERVICE.name, MODEL_GATEWAY.name, MODEL_CACHE.name)
"""Kinds that are reconciled."""

BUDGETS = tuple(
    Kind(f"policy/{version}", "PodDisruptionBudget", "poddisruptionbudgets") for version in ("v1", "v1beta1")
)

_BY_NAME = {
    (kind.api_version, kind.name): kind
    for kind in (
        MODEL_SERVICE,
        WORKER_POOL,
        MODEL_GATEWAY,
        MODEL_ADAPTER,
        MODEL_CACHE,
        JOB,
        CLAIM,
        CONFIG_MAP,
        DEPLOYMENT,
        POD,
        SERVICE,
        SECRET,
        EVENT,
        LEASE,
        NETWORK_POLICY,
        HTTP_ROUTE,
        INFERENCE_POOL,
        POD_MONITOR,
        LEADER_WORKER_SET,
        *BUDGETS,
    )
}


def kind_of(api_version: str, name: str) -> Kind:
    """The kind of that name. Raises `KeyError` for one that no manifest of ours has."""
    return _BY_NAME[api_version, name]


_POD_SPEC = ("nodeName", "terminationGracePeriodSeconds")
_CHECK = ("name", "image", "command", "args")
_POD_STATUS = ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses", "message", "reason")

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One object as last received."""

    ref: Ref
    namespace: str
    uid: str
    version: int
    """resourceVersion: a greater one is newer. Kubernetes promises that they compare as numbers since 1.35, and etcd
    has made them so ever before."""
    owner: str
    """UID of its controller; empty without one."""
    service: str
    """Name of the ModelService that its labels name, or the spec of a ModelAdapter; empty without."""
    gateway: str
    """Name of the ModelGateway that its labels name; empty without."""
    cache: str
    """Name of the ModelCache that its labels name; empty without."""
    fingerprint: bytes
    body: Manifest
    """Without `managedFields`; of a pod only what is read of it, and nothing of the contents of a Secret."""

    @property
    def key(self) -> ServiceKey:
        """The object of `ROOTS` whose reconcile it concerns; one of these concerns itself."""
        if self.ref.kind in ROOTS:
            return ServiceKey(self.namespace, self.ref.name, self.ref.kind)
        if self.gateway:
            return ServiceKey(self.namespace, self.gateway, MODEL_GATEWAY.name)
        if self.cache:
            return ServiceKey(self.namespace, self.cache, MODEL_CACHE.name)
        return ServiceKey(self.namespace, self.service)

    @property
    def deleting(self) -> bool:
        return self.body["metadata"].get("deletionTimestamp") is not None

    @staticmethod
    def of(body: Mapping[str, Any]) -> "Seen":
        """From the API's own JSON."""
        given = body["metadata"]
        metadata = {name: given[name] for name in _METADATA if name in given}
        ref = Ref.of(body)
        kept: Manifest = {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": metadata}
        if ref.kind == POD.name:
            kept |= _pod(body)
        else:
            parts = ("spec", "status", "data") if ref.kind == CONFIG_MAP.name else ("spec", "status")
            kept |= {part: body[part] for part in parts if part in body}
        return Seen(
            ref=ref,
            namespace=given.get("namespace", ""),
            uid=given["uid"],
            version=int(given["resourceVersion"]),
            owner=next((one["uid"] for one in given.get("ownerReferences", ()) if one.get("controller")), ""),
            service=_service_of(body),
            gateway=given.get("labels", {}).get(GATEWAY_LABEL, ""),
            cache=given.get("labels", {}).get(CACHE_LABEL, ""),
            fingerprint=b"" if ref.kind == POD.name else _fingerprint(kept, body.get("data")),
            body=kept,
        )


def _service_of(body: Mapping[str, Any]) -> str:
    if body["kind"] == MODEL_ADAPTER.name:
        # People write these; a label of theirs means nothing.
        return str(body.get("spec", {}).get("serviceName", ""))
    return str(body["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))


def digest(part: object) -> bytes:
    """Equal for equal JSON, whatever the order of keys."""
    return hashlib.blake2b(msgspec.json.encode(part, order="deterministic"), digest_size=16).digest()


def _pod(body: Mapping[str, Any]) -> Manifest:
    spec, status = body.get("spec", {}), body.get("status", {})
    claims = [one for one in spec.get("volumes", ()) if "persistentVolumeClaim" in one]
    containers = [_container(one, {claim["name"] for claim in claims}) for one in spec.get("containers", ())]
    checks = [one for one in spec.get("initContainers", ()) if one["name"] == CHECK]
    kept = {"initContainers": [{key: one[key] for key in _CHECK if key in one} for one in checks]} if checks else {}
    if claims:
        kept["volumes"] = claims
    return {
        "spec": {"containers": containers, **kept, **{name: spec[name] for name in _POD_SPEC if name in spec}},
        "status": {name: status[name] for name in _POD_STATUS if name in status},
    }


def _container(container: Mapping[str, Any], claims: Container[str]) -> Manifest:
    """With its mounts of claims."""
    kept = {key: container[key] for key in ("name", "ports") if key in container}
    mounts = [one for one in container.get("volumeMounts", ()) if one["name"] in claims]
    return {**kept, "volumeMounts": mounts} if mounts else kept


def _fingerprint(body: Manifest, data: object) -> bytes:
    metadata, spec = body["metadata"], dict(body.get("spec", {}))
    if body["kind"] == WORKER_POOL.name:
        # The owner of the pool writes this; manifests never do.
        spec.pop("replicas", None)
    # Controllers of the cluster keep notes on objects under their own names.
    notes = {key: text for key, text in metadata.get("annotations", {}).items() if "kubernetes.io/" not in key}
    return digest([metadata.get("labels"), notes, metadata.get("ownerReferences"), spec, data])


TOMBSTONE_S = 600.0
"""An object that is gone is remembered so long: older news of it that comes late does not bring it back."""


class _Tombstone(NamedTuple):
    version: int
    """As of which it was gone."""
    at: float


class Store:
    """Objects by service; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._roots: dict[ServiceKey, Seen] = {}
        self._parts: defaultdict[ServiceKey, dict[Ref, Seen]] = defaultdict(dict)
        self._by_uid: dict[str, Seen] = {}
        self._gone: dict[str, _Tombstone] = {}

    def put(self, seen: Seen) -> bool:
        """Whether it was news."""
        tombstone = self._gone.get(seen.uid)
        if tombstone is not None and seen.version <= tombstone.version:
            return False
        # What a watch calls gone may only have lost our label, and have it again.
        self._gone.pop(seen.uid, None)
        old = self._by_uid.get(seen.uid)
        if old is not None:
            if old.version >= seen.version:
                return False
            # Its label may have moved it to another service.
            self._take_out(old)
        self._by_uid[seen.uid] = seen
        if seen.ref.kind in ROOTS:
            self._roots[seen.key] = seen
        else:
            self._parts[seen.key][seen.ref] = seen
        return True

    def drop(self, seen: Seen) -> None:
        """It is deleted as of its version. Another object that has its name in the meantime stays."""
        self._bury(seen, seen.version)

    def _bury(self, seen: Seen, version: int) -> None:
        self._gone[seen.uid] = _Tombstone(version, self._clock())
        old = self._by_uid.pop(seen.uid, None)
        if old is not None:
            self._take_out(old)

    def replace(self, kind: Kind, namespace: str | None, listed: Iterable[Seen], version: int) -> list[Seen]:
        """All of one kind as a list of that version has them. What has changed or is gone."""
        current = {seen.uid: seen for seen in listed}
        news = [seen for seen in current.values() if self.put(seen)]
        known = [seen for seen in self._by_uid.values() if seen.ref.kind == kind.name]
        for seen in known:
            if namespace in (None, seen.namespace) and seen.uid not in current and seen.version <= version:
                self._bury(seen, version)
                news.append(seen)
        self._forget_the_dead()
        return news

    def key_of(self, uid: str) -> ServiceKey | None:
        """Whose reconcile the newest known version of an object concerns."""
        seen = self._by_uid.get(uid)
        return None if seen is None else seen.key

    def service(self, key: ServiceKey) -> Seen | None:
        """The ModelService, ModelGateway or ModelCache."""
        return self._roots.get(key)

    def services(self) -> list[Seen]:
        """All ModelServices."""
        return [seen for key, seen in self._roots.items() if key.kind == MODEL_SERVICE.name]

    def roots(self) -> list[Seen]:
        """All ModelServices, ModelGateways and ModelCaches."""
        return list(self._roots.values())

    def behind(self, gateway: ServiceKey) -> list[Seen]:
        """ModelServices that refer to a ModelGateway, whether it exists or not."""
        found = (seen for seen in self.services() if seen.namespace == gateway.namespace)
        return [seen for seen in found if gateway_name_of(seen) == gateway.name]

    def caches(self) -> list[Seen]:
        """All ModelCaches."""
        return [seen for key, seen in self._roots.items() if key.kind == MODEL_CACHE.name]

    def users(self, cache: ServiceKey) -> list[Seen]:
        """ModelServices that name a ModelCache, whether it exists or not."""
        found = (seen for seen in self.services() if seen.namespace == cache.namespace)
        return [seen for seen in found if cache_name_of(seen) == cache.name]

    def workloads(self, namespace: str) -> list[Seen]:
        """Deployments, groups of pods, and pods of a namespace: pods outlive the template that they were made from."""
        kinds = (DEPLOYMENT.name, LEADER_WORKER_SET.name, POD.name)
        return [one for one in self._by_uid.values() if one.namespace == namespace and one.ref.kind in kinds]

    def model_files(self, namespace: str) -> list[Seen]:
        """ConfigMaps of the ModelGateways of a namespace."""
        found = (one for one in self._by_uid.values() if one.namespace == namespace)
        return [one for one in found if one.ref.kind == CONFIG_MAP.name and one.gateway]

    def related(self, key: ServiceKey) -> list[ServiceKey]:
        """What else is to be reconciled after a change: services that refer to a ModelGateway or name a ModelCache; all
        ModelGateways and ModelCaches of a service's namespace, because it may have referred to another one before.
        """
        if key.kind == MODEL_GATEWAY.name:
            return [seen.key for seen in self.behind(key)]
        if key.kind == MODEL_CACHE.name:
            return [seen.key for seen in self.users(key)]
        return [one for one in self._roots if one.kind != MODEL_SERVICE.name and one.namespace == key.namespace]

    def parts(self, key: ServiceKey) -> list[Seen]:
        """Objects that name this service in their labels, whatever their owner."""
        return list(self._parts.get(key, {}).values())

    def _take_out(self, seen: Seen) -> None:
        if self._roots.get(seen.key) is seen:
            del self._roots[seen.key]
        parts = self._parts.get(seen.key, {})
        if parts.get(seen.ref) is seen:
            del parts[seen.ref]
            if not parts:
                del self._parts[seen.key]

    def _forget_the_dead(self) -> None:
        limit = self._clock() - TOMBSTONE_S
        self._gone = {uid: one for uid, one in self._gone.items() if one.at > limit}


logger = logging.getLogger(__name__)


def spec_of(service: Seen) -> ModelServiceSpec:
    """Raises `ValueError` with one sentence when it does not match this operator's schema: an older CRD let it
    pass, or a newer one [definitions-skew]."""
    return _spec_as(service.body.get("spec"), ModelServiceSpec)


Form = TypeVar("Form", bound=ModelServiceSpec | ModelGatewaySpec | ModelCacheSpec)


def _spec_as(spec: object, form: type[Form]) -> Form:
    try:
        return msgspec.convert(spec, form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_path(str(error))}; apply the CRDs of this operator's version and correct it") from None


Status = TypeVar("Status", bound=ModelServiceStatus | ModelGatewayStatus | ModelCacheStatus | WorkerPoolStatus)


def status_as(seen: Seen, form: type[Status]) -> Status:
    """As last written; an empty one when it cannot be read, because it is written again anyway."""
    try:
        return msgspec.convert(seen.body.get("status", {}), form)
    except msgspec.ValidationError as error:
        logger.warning("resetting the invalid status of %s %s: %s", seen.ref.kind, seen.ref.name, error)
        return form()


def status_of(service: Seen) -> ModelServiceStatus:
    """Of a ModelService."""
    return status_as(service, ModelServiceStatus)


def gateway_spec_of(gateway: Seen) -> ModelGatewaySpec:
    """Raises `ValueError` as `spec_of`."""
    return _spec_as(gateway.body.get("spec", {}), ModelGatewaySpec)


def gateway_name_of(service: Seen) -> str:
    """The ModelGateway to which a ModelService refers; empty without."""
    reference = service.body.get("spec", {}).get("gatewayRef")
    return str(reference.get("name", "")) if isinstance(reference, dict) else ""


def cache_spec_of(cache: Seen) -> ModelCacheSpec:
    """Raises `ValueError` as `spec_of`."""
    return _spec_as(cache.body.get("spec"), ModelCacheSpec)


def cache_name_of(service: Seen) -> str:
    """The ModelCache that a ModelService names; empty without."""
    model = service.body.get("spec", {}).get("model")
    reference = model.get("cacheRef") if isinstance(model, dict) else None
    return str(reference.get("name", "")) if isinstance(reference, dict) else ""


def ask_of(seen: Seen) -> AdapterAsk:
    """A ModelAdapter as plans use it."""
    spec, problem = None, ""
    try:
        spec = msgspec.convert(seen.body.get("spec"), ModelAdapterSpec)
    except msgspec.ValidationError as error:
        problem = f"{_path(str(error))}; apply the CRDs of this operator's version and correct it"
    try:
        before = msgspec.convert(seen.body.get("status", {}), ModelAdapterStatus)
    except msgspec.ValidationError as error:
        logger.warning("resetting the invalid status of ModelAdapter %s: %s", seen.ref.name, error)
        before = ModelAdapterStatus()
    return AdapterAsk(
        name=seen.ref.name,
        created=seen.body["metadata"].get("creationTimestamp", ""),
        generation=generation_of(seen),
        spec=spec,
        problem=problem,
        before=before,
    )


def generation_of(seen: Seen) -> int:
    """Of its spec."""
    return int(seen.body["metadata"].get("generation", 0))


def _path(error: str) -> str:
    """msgspec names places as `$.prefill`; people know them as spec.prefill."""
    text, found, place = error.partition(" - at `$")
    return f"spec{place.rstrip('`')}: {text}" if found else f"spec: {text}"
