"""Plans from spec and observed state what to write and report. Pure: no clock, no network, no order of events.

    served(spec) ─▶ problems? ─ yes ─▶ status alone: running pods stay as they are
                        │ no
                        ▼
    revision, desired workers ─▶ rollout.next_step ─▶ manifests, scalings, deletions ─▶ conditions

A plan made from the state that it produced changes nothing.

`revision_of` hashes what KV and weights depend on, including what computes them. Workers of different revisions are
never paired: a change of one of these creates new workers in addition to the old ones (`planning.rollout`). A
Deployment changes everything else within the revision, pod by pod.

`held` implements `spec.rollout.paused` within a revision: Deployments are paused, as by `kubectl rollout pause`.

    template changed, paused       existing pods stay; a scale-up creates pods like them, a scale-down removes some
    no longer paused               the Deployment replaces its pods by those of the newest template

A Deployment creates its first pods only from a template that it has accepted, and a paused one accepts none. It is
therefore paused once it has pods, and stays paused while the spec requires it, whatever happens to the pods. A
LeaderWorkerSet has no such field, but replaces no group below its partition, which then covers all groups.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from tandem_engine.base.addresses import Address
from tandem_operator.api.model_adapter import ModelAdapterStatus
from tandem_operator.api.model_service import GROUP, VERSION, ModelServiceStatus, RevisionStatus, RoleStatus
from tandem_operator.api.pods import PodOverrides
from tandem_operator.api.types import ROLES, Condition, RoleName, condition
from tandem_operator.api.worker_pool import WorkerPoolStatus
from tandem_operator.builders.arguments import decisive, worker_arguments
from tandem_operator.builders.containers import Manifest, host_path_problems
from tandem_operator.builders.gateway import gateway_deployment, gateway_service, http_route
from tandem_operator.builders.inference_pool import inference_pool
from tandem_operator.builders.naming import (
    curve_secret_name,
    gateway_name,
    gateways_name,
    labels_of,
    pool_name,
    redis_secret_name,
    router_name,
    selector_of,
)
from tandem_operator.builders.pod_patch import overrides_of, patch_problems, with_patch, with_templates
from tandem_operator.builders.policies import WorkerSet, disruption_budgets, network_policies, pod_monitors
from tandem_operator.builders.redis import redis_deployment, redis_service
from tandem_operator.builders.served import Served, worker_pool
from tandem_operator.builders.worker import LEADER_WORKER_SETS, workers
from tandem_operator.planning.adapter_status import adapters_ready, model_adapter_statuses
from tandem_operator.planning.adapters import accepted, statuses_of
from tandem_operator.planning.observed import Observed, Ref
from tandem_operator.planning.rollout import Counts, RevisionSeen, Step, next_step
from tandem_operator.planning.slo import SLO_CONDITIONS, slo_status
from tandem_operator.planning.status import (
    READY,
    ROUTER_READY,
    VALID,
    health_of,
    invalid,
    model_cached,
    name_taken,
    ready,
    settled,
    status_error,
)
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import OperatorSettings


def held(manifests: Iterable[Manifest], service: Served, observed: Observed) -> tuple[Manifest, ...]:
    """`manifests`, Deployments among them paused where the spec requires it."""
    if not service.spec.rollout.paused:
        return tuple(manifests)
    running = {one.name for one in observed.deployments if one.paused or one.pods}
    return tuple(_paused(one) if one["metadata"]["name"] in running else one for one in manifests)


def _paused(manifest: Manifest) -> Manifest:
    spec = manifest["spec"]
    match manifest["kind"]:
        case "Deployment":
            return {**manifest, "spec": {**spec, "paused": True}}
        case "LeaderWorkerSet":
            strategy = spec["rolloutStrategy"]
            update = {**strategy["rollingUpdateConfiguration"], "partition": spec["replicas"]}
            return {**manifest, "spec": {**spec, "rolloutStrategy": {**strategy, "rollingUpdateConfiguration": update}}}
    return manifest


DIGITS = 8


def revision_of(service: Served) -> str:
    """Equal for equal checkpoints, engine images, devices, pods of a worker, number formats and page sizes; ten years
    from now too.
    """
    spec = service.spec
    parts = {
        "model": msgspec.to_builtins(spec.model),
        "image": service.engine_image("prefill"),
        "dtype": spec.engine.dtype,
        "page_size": spec.engine.page_size,
    }
    devices = {role: service.device(role) for role in ROLES}
    if set(devices.values()) != {"cpu"}:
        # Left out of CPUs', whose revisions are older than this field.
        parts |= {"devices": devices, "decode_image": service.engine_image("decode")}
    nodes = {role: service.nodes(role) for role in ROLES}
    if set(nodes.values()) != {1}:
        # One pod and several are objects of different kinds, which do not take over from each other.
        parts["nodes"] = nodes
    if spec.engine.kv_cache_dtype is not None:
        parts["kv_cache_dtype"] = spec.engine.kv_cache_dtype
    # Left out where they are not set, as in revisions that are older than these fields.
    chosen = {"quantization": spec.engine.quantization, "model_impl": spec.engine.model_impl}
    parts |= {name: setting for name, setting in chosen.items() if setting is not None}
    arguments = {role: words for role in ROLES if (words := decisive(worker_arguments(service, role)))}
    if arguments:
        parts["arguments"] = arguments
    canonical = msgspec.json.encode(parts, order="deterministic")
    return hashlib.blake2b(canonical, digest_size=DIGITS // 2).hexdigest()


MAX_REVISIONS_SHOWN = 16
"""Revisions with workers that a status names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """A number of replicas to write through the scale subresource."""

    ref: Ref
    replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What to do, in this order: secrets, manifests, scalings, deletions."""

    secrets: tuple[str, ...] = ()
    """Secrets to generate where they are absent: of CURVE keys, of the Redis password."""
    apply: tuple[Manifest, ...] = ()
    """By server-side apply."""
    scale: tuple[Scaling, ...] = ()
    delete: tuple[Ref, ...] = ()
    pools: Mapping[RoleName, WorkerPoolStatus] = field(default_factory=dict)
    """Statuses of the WorkerPools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Changes):
    """Of a ModelService: at the end, its status is written."""

    model_adapters: Mapping[str, ModelAdapterStatus] = field(default_factory=dict)
    """Statuses of the ModelAdapters, by their names."""
    status: ModelServiceStatus


def make_plan(
    service: Served, observed: Observed, before: ModelServiceStatus, generation: int, settings: OperatorSettings
) -> Plan:
    """`before`: the status as it is, for what time does not change."""
    problems = problems_of(service, settings.apis, settings.allow)
    if problems:
        return refused(problems, observed, before, generation)
    if observed.foreign:
        return Plan(status=_status(before, [name_taken(observed.foreign)], observed, generation))
    if service.spec.model.cache_ref is not None:
        # Neither it nor workers have a commit yet: with one, its claim is the model.
        conditions = [condition(VALID, True, "SpecAccepted"), *model_cached(observed)]
        return Plan(status=_status(before, conditions, observed, generation))
    target = revision_of(service)
    wanted = wanted_workers(service, observed)
    step = next_step(target, wanted, _revisions(observed), service.spec.rollout)
    built = _manifests(service, observed, target, step, settings)
    patched, unfit = with_patches(service, built, settings)
    if unfit:
        return refused(unfit, observed, before, generation)
    manifests = held(patched, service, observed)
    found = accepted(service, observed.adapter_requests)
    workers, reading = observed.ready_workers, observed.adapters
    adapters = statuses_of(found.wanted, before.adapters, reading, workers)
    conditions = [*health_of(service, observed, target, wanted), *adapters_ready(adapters, before.conditions)]
    status = msgspec.structs.replace(_status(before, conditions, observed, generation), adapters=adapters)
    return Plan(
        secrets=generated_secrets(service, observed),
        apply=manifests,
        scale=(*_pool_scalings(service, observed, wanted), *_old_scalings(observed, target, step)),
        delete=_superfluous(observed, manifests, step, gateways=_former_gateways(service, conditions)),
        pools={role: _pool_status(service, observed, role) for role in ROLES},
        model_adapters=model_adapter_statuses(
            observed.adapter_requests, found, adapters, reading, workers, observed.now
        ),
        status=_with_workers(status, service, observed, target, wanted, step),
    )


def refused(problems: list[str], observed: Observed, before: ModelServiceStatus, generation: int) -> Plan:
    """Of a spec that cannot be served: nothing is changed, and the status reports why."""
    return Plan(status=_status(before, [invalid(problems)], observed, generation))


def wanted_workers(service: Served, observed: Observed) -> Counts:
    """Workers of each role: the spec's number, or that of the owner of the pool."""
    scaling = service.spec.autoscaling
    wanted: Counts = {}
    for role in ROLES:
        part = service.role(role)
        count = part.replicas if scaling.mode == "none" else observed.pools.get(role, part.replicas)
        if scaling.mode == "internal":
            count = min(max(count, part.scaling.min_replicas), part.scaling.max_replicas)
        wanted[role] = count
    return wanted


def _revisions(observed: Observed) -> list[RevisionSeen]:
    names = list(dict.fromkeys(one.revision for one in observed.workers() if one.revision is not None))
    return [
        RevisionSeen(
            name=name,
            desired={one.role: one.replicas for one in observed.workers() if one.revision == name and one.role},
            ready={one.role: one.ready for one in observed.workers() if one.revision == name and one.role},
            canary_passed=name in observed.canaries and observed.canaries[name].passed,
        )
        for name in names
    ]


def _manifests(
    service: Served, observed: Observed, target: str, step: Step, settings: OperatorSettings
) -> tuple[Manifest, ...]:
    manifests = [worker_pool(service, role) for role in ROLES]
    manifests += [
        workers(service, role, target, step.desired[target][role], standby=settings.canaries) for role in ROLES
    ]
    if service.spec.redis.managed is not None:
        manifests += [redis_deployment(service), redis_service(service)]
    if service.has_gateways:
        pool = inference_pool(service)
        route = http_route(service, to_pool=bool(pool))
        manifests += [gateway_deployment(service), gateway_service(service)]
        manifests += [*([route] if route is not None else []), *pool]
    manifests += pod_monitors(service)
    manifests += disruption_budgets(service, settings, _worker_sets(service, observed, target))
    manifests += network_policies(service, settings)
    return tuple(manifests)


def with_patches(
    service: Served, manifests: Iterable[Manifest], settings: OperatorSettings
) -> tuple[list[Manifest], list[str]]:
    """`manifests` with the patches of the spec, and what is wrong with these, and with its host paths."""
    results, problems = [], []
    for manifest in manifests:
        place, overrides = overrides_of(service, manifest["metadata"].get("labels", {}))

        def change(template: Manifest, place: str = place, overrides: PodOverrides = overrides) -> Manifest:
            found = list(host_path_problems(f"{place}.hostPaths", overrides.host_paths, template))
            found += patch_problems(f"{place}.patch", overrides.patch, template, settings.allow)
            problems.extend(found)
            return template if found else with_patch(template, overrides.patch)

        results.append(with_templates(manifest, change) if overrides.patch or overrides.host_paths else manifest)
    return results, list(dict.fromkeys(problems))


def _worker_sets(service: Served, observed: Observed, target: str) -> list[WorkerSet]:
    """Of the wanted revision, and of others as long as they have workers."""
    sets = {(role, target): WorkerSet(role=role, revision=target, grouped=service.nodes(role) > 1) for role in ROLES}
    for one in observed.workers():
        if one.role is None or one.revision is None or (one.revision != target and not one.replicas and not one.pods):
            continue
        sets[one.role, one.revision] = WorkerSet(
            role=one.role,
            revision=one.revision,
            grouped=one.api_version == LEADER_WORKER_SETS,
            exchanging=one.exchanging,
        )
    return list(sets.values())


def generated_secrets(service: Served, observed: Observed) -> tuple[str, ...]:
    """Secrets to generate, of those that the spec does not name."""
    wanted = []
    if service.spec.security.curve_secret is None:
        wanted.append(curve_secret_name(service.name))
    if service.spec.redis.managed is not None:
        wanted.append(redis_secret_name(service.name))
    return tuple(name for name in wanted if name not in observed.secrets)


def _pool_scalings(service: Served, observed: Observed, wanted: Counts) -> list[Scaling]:
    """A pool that is not there yet begins with the spec's figure; later it is ours only in mode none."""
    ours = service.spec.autoscaling.mode == "none"
    return [
        Scaling(ref=_pool_ref(service, role), replicas=wanted[role])
        for role in ROLES
        if role not in observed.pools or (ours and observed.pools[role] != wanted[role])
    ]


def _old_scalings(observed: Observed, target: str, step: Step) -> list[Scaling]:
    """Deployments of other revisions keep their pods as they are: only their number changes."""
    scalings = []
    for one in observed.workers():
        if one.revision in (None, target) or one.role is None:
            continue
        replicas = step.desired.get(one.revision or "", {}).get(one.role, 0)
        if replicas != one.replicas:
            scalings.append(Scaling(ref=one.ref, replicas=replicas))
    return scalings


def _former_gateways(service: Served, conditions: Iterable[Condition]) -> frozenset[str]:
    """Names of objects of a service's own gateways that serve on until a ModelGateway does."""
    if service.has_gateways or any(one.type == ROUTER_READY and one.status == "True" for one in conditions):
        return frozenset()
    return frozenset({gateway_name(service.name), gateways_name(service.name), router_name(service.name), service.name})


def _superfluous(
    observed: Observed, manifests: tuple[Manifest, ...], step: Step, *, gateways: frozenset[str]
) -> tuple[Ref, ...]:
    """What we own and no longer want. A Deployment of workers goes when its last pod has drained; objects with names in
    `gateways` stay.
    """
    kept = {ref for ref in observed.owned if ref.name in gateways}
    kept |= set(map(Ref.of, manifests))
    for one in observed.workers():
        counts = step.desired.get(one.revision or "", {})
        if one.pods > 0 or (one.role is not None and counts.get(one.role, 0) > 0):
            kept.add(one.ref)
    return tuple(sorted(observed.owned - kept, key=lambda ref: (ref.kind, ref.name)))


def _status(
    before: ModelServiceStatus, conditions: list[Condition], observed: Observed, generation: int
) -> ModelServiceStatus:
    found = {one.type for one in conditions}
    # Of an invalid spec nothing new is known about what runs.
    kept = [one for one in before.conditions if one.type not in found and one.type != READY]
    everything = [*conditions, *kept]
    timed = settled(
        [ready(everything, observed.cache), *everything], before.conditions, generation=generation, now=observed.now
    )
    return ModelServiceStatus(
        observed_generation=generation,
        conditions=timed,
        ready=before.ready,
        serving=before.serving,
        error=status_error(timed),
        endpoint=before.endpoint,
        revision=before.revision,
        revisions=before.revisions,
        history=before.history,
        decisions=before.decisions if observed.decisions is None else list(observed.decisions),
        slo=before.slo,
        adapters=before.adapters,
    )


def _with_workers(
    status: ModelServiceStatus, service: Served, observed: Observed, target: str, wanted: Counts, step: Step
) -> ModelServiceStatus:
    serving = _serving(observed, target)
    counted = {role: _ready(observed, serving or target, role) for role in ROLES}
    endpoint = endpoint_of(service)
    if service.spec.gateway_ref is not None:
        endpoint = observed.gateway.endpoint if observed.gateway is not None else ""
    slo = service.spec.slo
    history = [name for name in (status.revision, *status.history) if name and name != target]
    return msgspec.structs.replace(
        status,
        ready=" ".join(f"{counted[role]}/{wanted[role]}{role[0].upper()}" for role in ROLES),
        serving=serving,
        endpoint=endpoint,
        revision=target,
        history=list(dict.fromkeys(history))[: service.spec.rollout.history],
        revisions=_revision_statuses(observed, step),
        slo=None if slo is None else slo_status(slo, observed.slo, status.slo),
        conditions=[one for one in status.conditions if slo is not None or one.type not in SLO_CONDITIONS],
    )


def endpoint_of(service: Served) -> str:
    """Address of its gateways for clients inside the cluster."""
    host = f"{gateway_name(service.name)}.{service.namespace}.svc"
    return Address(host, service.spec.gateway.service.port).url().removesuffix(":80")


def _serving(observed: Observed, target: str) -> str:
    """The revision with most decode workers that are ready, for new requests follow them; empty without any."""
    names = {one.revision for one in observed.workers() if one.revision is not None}
    shares = {name: (_ready(observed, name, "decode"), name == target, name) for name in names}
    best = max(shares, key=lambda name: shares[name], default="")
    return best if best and shares[best][0] > 0 else ""


def _ready(observed: Observed, revision: str, role: RoleName) -> int:
    return sum(one.ready for one in observed.workers() if one.revision == revision and one.role == role)


def _revision_statuses(observed: Observed, step: Step) -> list[RevisionStatus]:
    ready_all = sum(one.ready for one in observed.workers() if one.role == "decode")
    statuses = []
    for name, counts in step.desired.items():
        roles = {role: _role_status(observed, name, role, counts) for role in ROLES}
        if not any(counts.values()) and not any(one.ready or one.pending for one in roles.values()):
            continue
        share = roles["decode"].ready / ready_all if ready_all else 0.0
        statuses.append(
            RevisionStatus(name=name, share=round(share, 3), prefill=roles["prefill"], decode=roles["decode"])
        )
    return statuses[:MAX_REVISIONS_SHOWN]


def _role_status(observed: Observed, revision: str, role: RoleName, counts: Counts) -> RoleStatus:
    seen = [one for one in observed.workers() if one.revision == revision and one.role == role]
    ready_now = sum(one.ready for one in seen)
    return RoleStatus(
        desired=counts.get(role, 0),
        ready=ready_now,
        pending=max(0, sum(one.pods for one in seen) - ready_now),
    )


def _pool_status(service: Served, observed: Observed, role: RoleName) -> WorkerPoolStatus:
    seen = [one for one in observed.workers() if one.role == role]
    selector = selector_of(labels_of(service.name, "worker", role=role))
    return WorkerPoolStatus(
        replicas=sum(one.pods for one in seen),
        ready_replicas=sum(one.ready for one in seen),
        selector=",".join(f"{key}={value}" for key, value in sorted(selector.items())),
    )


def _pool_ref(service: Served, role: RoleName) -> Ref:
    return Ref(api_version=f"{GROUP}/{VERSION}", kind="WorkerPool", name=pool_name(service.name, role))
