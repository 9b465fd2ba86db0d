"""Errors of a spec that its schema cannot find. Checked before anything is created; running pods are not affected.

Each error names the field, its value and the fix [specs-refused].
"""

from collections.abc import Iterator, Set
from ipaddress import ip_network
from typing import NamedTuple

import msgspec

from tandem_operator.api.pods import PodOverrides
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.arguments import argument_problems
from tandem_operator.builders.containers import FIELDS, parse_quantity, privileges_of, resource_problems
from tandem_operator.builders.engine_flags import OTHER_GPUS, SHARED_GPU, gpus_of, nvidia_gpus_of, shares_gpu
from tandem_operator.builders.served import Served
from tandem_operator.planning.adapter_rules import adapter_problems
from tandem_operator.planning.cell_rules import cell_problems
from tandem_operator.settings import ClusterApis, ObjectPrivilege, Privilege

MAX_GROUPED_NAME = 32
"""StatefulSets have names of at most 52 characters, to which a label adds a hash; ours add role, revision and group."""

MIB_OF_PROCESS = 256
"""Least memory of one of several processes of a gateway: 90 MiB at rest, and what requests and a tokenizer take."""


class _Optional(NamedTuple):
    """An object of an API that a cluster may lack, required by a field of the spec."""

    field: str
    privilege: ObjectPrivilege
    api: str
    url: str


ROUTE = _Optional(
    "spec.gateway.httpRoute",
    "routes",
    "HTTPRoutes of the Gateway API (gateway.networking.k8s.io/v1)",
    "https://gateway-api.sigs.k8s.io",
)

POOL = _Optional(
    "spec.gateway.inferencePool",
    "routes",
    "the Gateway API Inference Extension (inference.networking.k8s.io/v1)",
    "https://gateway-api-inference-extension.sigs.k8s.io",
)

MONITOR = _Optional(
    "spec.observability.serviceMonitor",
    "monitors",
    "PodMonitors of the Prometheus operator (monitoring.coreos.com/v1)",
    "https://prometheus-operator.dev",
)


def problems_of(service: Served, apis: ClusterApis, allow: Set[Privilege] = frozenset()) -> list[str]:
    """One sentence each; empty when the spec can be served by a cluster that has `apis`, with no more than what the
    administrator of the operator allows.
    """
    return [
        *_pod_problems(service, apis, allow),
        *_reference(service),
        *_names(service),
        *adapter_problems(service),
        *cell_problems(service),
        *(text for role in ROLES for text in _engine(service, role, apis)),
        *_devices(service),
    ]


def shared_problems(gateway: Served, apis: ClusterApis, allow: Set[Privilege] = frozenset()) -> list[str]:
    """The same of a ModelGateway, whose spec has what is in `spec.gateway` of a ModelService."""
    found = [*_pod_problems(gateway, apis, allow), *_picker(gateway)]
    return [text.replace("spec.gateway.", "spec.") for text in found]


def _pod_problems(service: Served, apis: ClusterApis, allow: Set[Privilege]) -> Iterator[str]:
    yield from _privileges(service, allow)
    yield from _objects(service, apis, allow)
    yield from _ways_back(service)
    yield from argument_problems(service)
    yield from _quantities(service)
    yield from _destinations(service)
    yield from _processes(service)


def _picker(gateway: Served) -> Iterator[str]:
    if gateway.spec.gateway.inference_pool is not None:
        yield (
            "spec.gateway.inferencePool: an endpoint picker selects workers of one model, and a ModelGateway may have "
            "several; remove it and use httpRoute, or set it in a ModelService without gatewayRef"
        )


OF_MODEL = frozenset(
    {
        *("router_policy", "router_exploration", "local_prefill_tokens", "prefill_fallback"),
        *("tool_call_parser", "reasoning_parser", "parse_special_tokens", "tokenizer"),
    }
)
"""Fields of `spec.gateway` that depend on the model: also a service behind a ModelGateway may set them."""

OF_QUEUE = frozenset({"max_waiting_requests", "queue_timeout_seconds"})
"""The same of `spec.gateway.limits`: each model has a queue."""


def _reference(service: Served) -> Iterator[str]:
    """What a service with `gatewayRef` cannot have, because the gateways are not its own."""
    reference, spec = service.spec.gateway_ref, service.spec
    if reference is None:
        return
    named = f"ModelGateway {reference.name!r}"
    set_here = [
        *(f"gateway.{name}" for name in _changed(spec.gateway, OF_MODEL | {"limits"})),
        *(f"gateway.limits.{name}" for name in _changed(spec.gateway.limits, OF_QUEUE)),
    ]
    for field in set_here:
        yield f"spec.{field}: with gatewayRef it is of {named}; remove it and set it there"
    if spec.security.client_namespaces:
        yield f"spec.security.clientNamespaces: clients reach {named} alone; remove it and set it there"
    hub = spec.model.hugging_face
    unmounted = spec.model.image is not None or (hub is not None and hub.cache_claim is None)
    if spec.gateway.tokenizer == "model" and unmounted:
        given = "image" if hub is None else "huggingFace without cacheClaim"
        yield (
            f"spec.gateway.tokenizer: gateways of a ModelGateway read tokenizers from their image or from a claim, not "
            f"from model.{given}; set it to workers, or use model.path, model.claim or model.huggingFace.cacheClaim"
        )


def _changed(part: msgspec.Struct, free: Set[str]) -> list[str]:
    """Fields of `part` that have other values than by default, as users write them, without those of `free`."""
    default = type(part)()
    return [
        one.encode_name
        for one in msgspec.structs.fields(part)
        if one.name not in free and getattr(part, one.name) != getattr(default, one.name)
    ]


def _privileges(service: Served, allow: Set[Privilege]) -> Iterator[str]:
    for path, overrides in _pods(service).items():
        for asked in privileges_of(overrides):
            if asked not in allow:
                yield (
                    f"spec.{path}.pod.{FIELDS[asked]}: this operator does not allow {asked}; remove it, or start "
                    f"the operator with --allow {asked}"
                )


def _objects(service: Served, apis: ClusterApis, allow: Set[Privilege]) -> Iterator[str]:
    """What is requested and not allowed, or not served by the cluster."""
    gateway = service.spec.gateway
    asked = (
        (ROUTE, gateway.http_route is not None, apis.http_routes),
        (POOL, gateway.inference_pool is not None, apis.inference_pools),
        (MONITOR, service.spec.observability.service_monitor, apis.pod_monitors),
    )
    for one, wanted, there in asked:
        if wanted and one.privilege not in allow:
            yield (
                f"{one.field}: this operator does not allow {one.privilege}; remove it, or start the operator "
                f"with --allow {one.privilege}"
            )
        elif wanted and not there:
            yield (
                f"{one.field}: needs {one.api}, which this cluster does not serve; install it ({one.url}) and restart "
                f"the operator, or take the field out"
            )


def _ways_back(service: Served) -> Iterator[str]:
    """Paths that leave the folder that they seem to name, where the CRD in the cluster is older than this rule."""
    model = service.spec.model
    paths = [
        ("spec.model.path", model.path),
        ("spec.model.huggingFace.revision", model.hugging_face.revision if model.hugging_face is not None else None),
    ]
    engines = {"engine": service.spec.engine, **{f"{role}.engine": service.role(role).engine for role in ROLES}}
    for name, engine in engines.items():
        draft = engine.speculation.draft_model_path if engine.speculation is not None else None
        directory = engine.storage.directory if engine.storage is not None else None
        paths += [(f"spec.{name}.speculation.draftModelPath", draft), (f"spec.{name}.storage.directory", directory)]
    for part, overrides in _pods(service).items():
        for number, one in enumerate(overrides.host_paths):
            field = f"spec.{part}.pod.hostPaths[{number}]"
            paths += [(f"{field}.path", one.path), (f"{field}.mountPath", one.mount_path)]
    for field, path in paths:
        if path is not None and ".." in path.split("/"):
            yield f"{field}: {path!r} leads out of the folder by '..'; name the folder itself"


def _pods(service: Served) -> dict[str, PodOverrides]:
    """The pod settings of each part, by its place below `spec`."""
    spec = service.spec
    pods = {"prefill": spec.prefill.pod, "decode": spec.decode.pod, "gateway": spec.gateway.pod}
    if spec.gateway.inference_pool is not None:
        pods["gateway.inferencePool"] = spec.gateway.inference_pool.pod
    if spec.redis.managed is not None:
        pods["redis.managed"] = spec.redis.managed.pod
    return pods


def _names(service: Served) -> Iterator[str]:
    if service.model_name in service.spec.aliases:
        yield f"spec.aliases: {service.model_name!r} is the model's own name already; take it out"


def _quantities(service: Served) -> Iterator[str]:
    spec = service.spec
    parts = [
        ("prefill", spec.prefill.resources),
        ("decode", spec.decode.resources),
        ("gateway", spec.gateway.resources),
    ]
    if spec.redis.managed is not None:
        parts.append(("redis.managed", spec.redis.managed.resources))
    if spec.gateway.inference_pool is not None:
        parts.append(("gateway.inferencePool", spec.gateway.inference_pool.resources))
    hubs = {f"adapters[{number}].source": one.source.hugging_face for number, one in enumerate(spec.adapters)}
    hubs["model"] = spec.model.hugging_face
    parts += [(f"{path}.huggingFace", hub.resources) for path, hub in hubs.items() if hub is not None]
    for path, resources in parts:
        yield from resource_problems(f"spec.{path}.resources", resources)


def _destinations(service: Served) -> Iterator[str]:
    for number, rule in enumerate(service.spec.security.egress):
        try:
            ip_network(rule.cidr or "0.0.0.0/0", strict=False)
        except ValueError:
            yield f"spec.security.egress[{number}].cidr: {rule.cidr!r} is no block of addresses, such as 10.0.0.0/8"


def _processes(service: Served) -> Iterator[str]:
    """A process that waits for its share of a CPU delays every stream that it has, and the pod is killed with all of
    them where its memory does not suffice: the default limit is that of few.
    """
    gateway = service.spec.gateway
    count, limits = gateway.processes or 1, gateway.resources.limits
    needs = {"cpu": (str(count), f"use {count} CPUs")}
    if count > 1:
        needs["memory"] = (f"{count * MIB_OF_PROCESS}Mi", f"need {MIB_OF_PROCESS}Mi of memory each")
    for name, (least, text) in needs.items():
        limit = limits.get(name)
        if gateway.processes is not None and limit is not None and parse_quantity(limit) < parse_quantity(least):
            yield (
                f"spec.gateway.processes: {count} processes {text}, and spec.gateway.resources.limits[{name}] is "
                f"{limit}; raise the limit to {least}, or lower processes"
            )


def _engine(service: Served, role: RoleName, apis: ClusterApis) -> Iterator[str]:
    yield from _device(service, role)
    yield from _ranks(service, role, apis)
    yield from _storage(service, role)


def _storage(service: Served, role: RoleName) -> Iterator[str]:
    engine = service.engine(role)
    if engine.storage is None:
        return
    if engine.host_cache is None or engine.host_cache.size_gib is None:
        yield (
            f"spec.{role}: engine.storage keeps what leaves host memory, and there is none; set "
            f"engine.hostCache.sizeGib, or remove storage"
        )
    ranks = engine.tensor_parallel_size or 1
    if ranks > 1:
        yield (
            f"spec.{role}: engine.storage with tensorParallelSize {ranks}: only workers of one rank keep files; remove "
            f"storage, or set tensorParallelSize to 1"
        )


def _device(service: Served, role: RoleName) -> Iterator[str]:
    engine, resources = service.engine(role), service.role(role).resources
    if service.device(role) == "cuda" and not nvidia_gpus_of(resources):
        yield (
            f"spec.{role}: engine.device is cuda and resources.limits names no NVIDIA GPU; add nvidia.com/gpu: "
            f'"{engine.tensor_parallel_size or 1}" to spec.{role}.resources.limits, or set the device to cpu'
        )
    elif service.device(role) == "cpu" and engine.device != "cpu" and gpus_of(resources):
        names = ", ".join(name for name in OTHER_GPUS if name in resources.limits)
        yield f"spec.{role}.resources.limits: engines run on NVIDIA GPUs or CPUs, not on {names}; take it out"
    sized = engine.mem_fraction_static is not None or engine.kv_cache_gib is not None
    if service.device(role) == "cuda" and shares_gpu(resources) and not sized:
        yield (
            f"spec.{role}: {SHARED_GPU} is a GPU whose memory others use too; say what this worker may have of it "
            f"in engine.memFractionStatic, such as 0.44 for two"
        )


def _devices(service: Served) -> Iterator[str]:
    devices = {role: service.device(role) for role in ROLES}
    if len(set(devices.values())) > 1 and service.spec.engine.dtype in (None, "auto"):
        shown = " and ".join(f"{role} on {device}" for role, device in devices.items())
        yield f"spec.engine.dtype: auto is another type on a GPU than on a CPU ({shown}); set it, e.g. to bfloat16"


def _ranks(service: Served, role: RoleName, apis: ClusterApis) -> Iterator[str]:
    ranks = service.engine(role).tensor_parallel_size or 1
    gpus, nodes = gpus_of(service.role(role).resources), service.nodes(role)
    if ranks % nodes:
        yield (
            f"spec.{role}: engine.nodes {nodes} does not divide tensorParallelSize {ranks}; each pod of a worker has "
            f"as many ranks: set nodes to a divisor of {ranks}"
        )
    elif gpus and ranks != gpus * nodes:
        over = f" and engine.nodes {nodes}" if nodes > 1 else ""
        yield (
            f"spec.{role}: tensorParallelSize {ranks} with {gpus} GPUs in resources.limits{over}; each rank has one "
            f"GPU: give each pod {ranks // nodes}, or set tensorParallelSize to {gpus * nodes}"
        )
    elif nodes > 1 and not apis.leader_worker_sets:
        yield (
            f"spec.{role}: tensorParallelSize {ranks} over {nodes} pods of {ranks // nodes} ranks needs the "
            f"LeaderWorkerSet API (leaderworkerset.x-k8s.io/v1), which this cluster does not serve; install it "
            f"(https://lws.sigs.k8s.io) and restart the operator, or set tensorParallelSize to {ranks // nodes}"
        )
    elif nodes > 1 and len(service.name) > MAX_GROUPED_NAME:
        yield (
            f"metadata.name: {service.name!r} has {len(service.name)} characters; with workers of {nodes} pods it may "
            f"have {MAX_GROUPED_NAME}, because names of StatefulSets begin with it"
        )
