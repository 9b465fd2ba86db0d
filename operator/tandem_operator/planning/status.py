"""The conditions of a ModelService, from its observed state. Each has a CamelCase reason and a message.

    Valid ─ ModelAvailable ─ RedisReady ─ PrefillWorkersReady ─ DecodeWorkersReady ─ RouterReady
                                      all of them  →  Ready
    ArgumentsAccepted (where `args` are given), AdaptersReady (where there are adapters), TransportReady, Progressing,
    AutoscalingActive, Degraded, VersionSkew, those of latency objectives (`planning.slo`)
                                                               informational; not part of Ready

`lastTransitionTime` changes only with the status of its condition, so that an unchanged service is not written again.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_operator.api.model_cache import ModelCacheStatus
from tandem_operator.api.model_gateway import ModelGatewayStatus
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import ROLES, Condition, RoleName, condition
from tandem_operator.builders.arguments import CHECK, accepts, lists_of, unknown_flags, worker_arguments
from tandem_operator.builders.model_mount import FROM_WORKERS
from tandem_operator.builders.naming import gateway_name, redis_name
from tandem_operator.builders.served import Served
from tandem_operator.planning.observed import CacheSeen, DeploymentSeen, Observed, Ref
from tandem_operator.planning.rollout import Counts
from tandem_operator.planning.slo import slo_conditions

VALID = "Valid"
MODEL_AVAILABLE = "ModelAvailable"
REDIS_READY = "RedisReady"
WORKERS_READY = {"prefill": "PrefillWorkersReady", "decode": "DecodeWorkersReady"}
ROUTER_READY = "RouterReady"
ARGUMENTS_ACCEPTED = "ArgumentsAccepted"
ADAPTERS_READY = "AdaptersReady"
TRANSPORT_READY = "TransportReady"
READY = "Ready"
PROGRESSING = "Progressing"
AUTOSCALING_ACTIVE = "AutoscalingActive"
DEGRADED = "Degraded"
MODEL_CACHED = "ModelCached"
FAILED = "Failed"
"""Of a ModelCache."""
VERSION_SKEW = "VersionSkew"

NEEDED = (VALID, MODEL_AVAILABLE, REDIS_READY, *WORKERS_READY.values(), ROUTER_READY)
"""What must be true for `Ready`, in the order in which people should look."""

_REFUSED = re.compile(rf"{CHECK}: ended with status 2\b")
"""A failure of the init container that is about arguments, unlike that of a pull of its image."""

MAX_ERROR = 80


def ready(conditions: Sequence[Condition], cache: CacheSeen | None) -> Condition:
    """`Ready`, with reason and sentence of the first that is in its way. `cache`: as `Observed.cache`."""
    waits = [MODEL_CACHED] if cache is not None and cache.served is None else []
    missing = first_missing(conditions, [VALID, *waits, *NEEDED])
    return missing or condition(READY, True, "CanaryPassed", "a request passed through prefill and decode")


def first_missing(conditions: Sequence[Condition], needed: Iterable[str]) -> Condition | None:
    """`Ready` with the first of the `needed` conditions that is not true; None if all are."""
    by_type = {one.type: one for one in conditions}
    for kind in needed:
        one = by_type.get(kind)
        if one is None:
            return condition(READY, None, f"{kind}Unknown", f"{kind} has not been checked yet")
        if one.status != "True":
            return condition(READY, False, one.reason, f"{kind}: {one.message}" if one.message else kind)
    return None


def status_error(conditions: Sequence[Condition]) -> str:
    """The first error of the conditions, shortened for a column of `kubectl get`."""
    bad = {
        VALID: "False",
        ARGUMENTS_ACCEPTED: "False",
        DEGRADED: "True",
        MODEL_CACHED: "False",
        VERSION_SKEW: "True",
        MODEL_AVAILABLE: "False",
        ADAPTERS_READY: "False",
        TRANSPORT_READY: "False",
    }
    by_type = {one.type: one for one in conditions}
    for kind, status in bad.items():
        one = by_type.get(kind)
        if one is not None and one.status == status:
            text = f"{one.reason}: {one.message}" if one.message else one.reason
            return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR - 1]}…"
    return ""


def settled(
    conditions: Iterable[Condition], before: Iterable[Condition], *, generation: int, now: str
) -> list[Condition]:
    """With times: those of `before` where the status is the same, else `now` (RFC 3339)."""
    known = {one.type: one for one in before}
    result = []
    for one in conditions:
        old = known.get(one.type)
        same = old is not None and old.status == one.status and old.last_transition_time
        result.append(
            msgspec.structs.replace(
                one,
                observed_generation=generation,
                last_transition_time=old.last_transition_time if same and old is not None else now,
            )
        )
    return result


GATEWAY_CANARY = ""

CHANGED_BY_OTHERS = "replicas are changed by someone else"
"""Beginning of the reason why the autoscaler holds."""


def invalid(problems: list[str]) -> Condition:
    """The spec cannot be served; what runs continues as it was."""
    return condition(VALID, False, "InvalidSpec", "; ".join(problems))


def name_taken(foreign: Iterable[Ref], kind: str = "ModelService") -> Condition:
    """Objects of others have names that ours would need; they are left alone."""
    names = ", ".join(sorted(f"{ref.kind} {ref.name!r}" for ref in foreign))
    end = "no pod uses them" if kind == "ModelCache" else "its gateways have drained"
    message = (
        f"{names} exist but are not owned by this {kind}; delete them, or rename it. Those of a deleted one of this "
        f"name are removed when {end}"
    )
    return condition(VALID, False, "NameTaken", message)


AnyStatus = TypeVar("AnyStatus", bound=ModelServiceStatus | ModelGatewayStatus | ModelCacheStatus)


def not_applied(planned: AnyStatus, before: AnyStatus, reason: str, message: str, now: str) -> AnyStatus:
    """`planned`, when it was not carried out: a quota, an admission rule, an unknown field, a missing right.

    `Ready` stays true where the service answers requests all the same, and takes the reason where it does not.
    """
    ready = next((one for one in planned.conditions if one.type == READY), None)
    if ready is None or ready.status != "True":
        ready = condition(READY, False, reason, message)
    kept = [one for one in planned.conditions if one.type not in (READY, DEGRADED)]
    conditions = [ready, *kept, condition(DEGRADED, True, reason, message)]
    timed = settled(conditions, before.conditions, generation=planned.observed_generation, now=now)
    return msgspec.structs.replace(planned, conditions=timed, error=status_error(timed))


def health_of(service: Served, observed: Observed, target: str, wanted: Counts) -> list[Condition]:
    """All conditions but `Ready`."""
    return [
        condition(VALID, True, "SpecAccepted"),
        *model_cached(observed),
        secrets_available(service, observed, MODEL_AVAILABLE),
        redis_ready(service, observed),
        *(_workers(observed, role, wanted[role]) for role in ROLES),
        _router(service, observed, wanted),
        *arguments_accepted(service, observed, target),
        _transport(service, observed),
        _progress(service, observed, target, wanted),
        _autoscaling(service, observed),
        *slo_conditions(service.spec.slo, observed.slo),
        degraded(observed, target),
        version_skew(observed),
    ]


def model_cached(observed: Observed) -> Iterator[Condition]:
    """Whether the ModelCache has the model; nothing of a service without one."""
    cache = observed.cache
    if cache is None:
        return
    place = cache.mounted
    kept = f"; workers keep {place.path}, and new ones get it while claim {place.claim_name!r} exists" if place else ""
    if not cache.exists:
        message = f"spec.model.cacheRef.name: there is no ModelCache {cache.name!r} in this namespace; create it{kept}"
        yield condition(MODEL_CACHED, False, "CacheMissing", message)
    elif cache.claim is None:
        message = f"ModelCache {cache.name!r}: {cache.message or 'the operator has not seen it yet'}{kept}"
        yield condition(MODEL_CACHED, False, cache.reason or "CachePending", message)
    else:
        yield condition(MODEL_CACHED, True, "Cached", f"commit {cache.commit} of ModelCache {cache.name!r}")


def secrets_available(service: Served, observed: Observed, kind: str) -> Condition:
    """Whether the Secrets that the spec names exist."""
    missing = [name for name in referenced_secrets(service) if name not in observed.secrets]
    if missing:
        return condition(kind, False, "SecretMissing", f"Secret {missing[0]!r} does not exist yet; create it")
    return condition(kind, True, "Referenced")


def referenced_secrets(service: Served) -> list[str]:
    """Secrets that the spec names; those that are made for it are left out."""
    spec = service.spec
    names = [spec.security.curve_secret, spec.gateway.auth_secret]
    if spec.redis.external is not None:
        external = spec.redis.external
        secrets = (external.password, external.sentinel_password, external.ca_secret)
        names += [one.name for one in secrets if one is not None]
    hubs = (spec.model.hugging_face, *(one.source.hugging_face for one in spec.adapters))
    names += [hub.token_secret.name for hub in hubs if hub is not None and hub.token_secret is not None]
    return [name for name in dict.fromkeys(names) if name is not None]


def redis_ready(service: Served, observed: Observed) -> Condition:
    """Whether its Redis is there, as far as that is known."""
    if service.spec.redis.external is not None:
        return condition(REDIS_READY, True, "External")
    seen = observed.deployment(redis_name(service.name))
    return available(REDIS_READY, seen, 1, "Redis")


def _workers(observed: Observed, role: RoleName, wanted: int) -> Condition:
    seen = [one for one in observed.workers() if one.role == role]
    count = sum(one.ready for one in seen)
    kind = WORKERS_READY[role]
    if wanted == 0:
        return condition(kind, True, "ScaledToZero", f"no {role} worker is wanted")
    if count >= wanted:
        return condition(kind, True, "AllReady", f"{count} of {wanted} {role} workers are ready")
    failure = next((one.failure for one in seen if one.failure), "")
    message = f"{count} of {wanted} {role} workers are ready" + (f": {failure}" if failure else "")
    # With one ready the service answers; `Degraded` and `Progressing` say the rest.
    reason = "Unschedulable" if "nodes are available" in failure else "PodsFailing" if failure else "Starting"
    return condition(kind, count > 0, "SomeReady" if count else reason, message)


TOKENIZERS_FROM_WORKERS = 1
"""First release whose gateways get the tokenizer from workers."""

_EARLIER_GATEWAY = re.compile(rf"--model {FROM_WORKERS}: no such folder")
"""What gateways of earlier releases end with."""

_EARLIER = (
    "gateways of this image get no tokenizers from workers, for it is of an earlier release; set "
    "spec.gateway.tokenizer to model, or name a newer image in spec.images.services"
)


def _with_fix(failure: str) -> str:
    """The failure of a pod, and what to change where that is known."""
    return f"{failure}: {_EARLIER}" if _EARLIER_GATEWAY.search(failure) else failure


def _router(service: Served, observed: Observed, wanted: Counts) -> Condition:
    gateways = _gateways(service, observed)
    if gateways.status != "True":
        return gateways
    if not any(wanted.values()):
        return condition(ROUTER_READY, True, "ScaledToZero", "the first request brings workers up")
    canary = observed.canaries.get(GATEWAY_CANARY)
    earlier = _earlier_gateways(service, observed)
    if earlier and (canary is None or canary.unserved):
        return condition(ROUTER_READY, False, "TokenizerUnavailable", earlier)
    if canary is None:
        return condition(ROUTER_READY, False, "CanaryPending", "no canary request has gone through the gateway yet")
    if not canary.passed:
        return condition(ROUTER_READY, False, "CanaryFailed", canary.message)
    return condition(ROUTER_READY, True, "CanaryPassed")


def _earlier_gateways(service: Served, observed: Observed) -> str:
    """What to change where gateways of its ModelGateway cannot get its tokenizer from workers; empty where they can."""
    reference, spec = service.spec.gateway_ref, service.spec
    if reference is None or spec.gateway.tokenizer == "model" or spec.model.path is not None:
        return ""
    prefix = f"{gateway_name(reference.name)}-"
    found = [release for pod, release in observed.releases.items() if pod.startswith(prefix)]
    earlier = any(release < TOKENIZERS_FROM_WORKERS for release in found)
    return f"ModelGateway {reference.name!r}: {_EARLIER}" if earlier else ""


def _gateways(service: Served, observed: Observed) -> Condition:
    """Whether there is a gateway for the service, its own or that of a ModelGateway."""
    reference = service.spec.gateway_ref
    if reference is None:
        deployment, replicas = observed.deployment(gateway_name(service.name)), service.spec.gateway.replicas
    elif observed.gateway is None:
        message = f"ModelGateway {reference.name!r} does not exist; create it, or remove spec.gatewayRef"
        return condition(ROUTER_READY, False, "GatewayMissing", message)
    elif observed.gateway.reason:
        return condition(ROUTER_READY, False, observed.gateway.reason, observed.gateway.message)
    else:
        deployment, replicas = observed.gateway.deployment, observed.gateway.replicas
    return available(ROUTER_READY, deployment, replicas, "gateway")


def arguments_accepted(service: Served, observed: Observed, target: str) -> Iterator[Condition]:
    """What the images say of the flags in `args`; nothing where there are none."""
    if not any(words for _, words in lists_of(service).values()):
        return
    refused = [one for one in observed.deployments if _REFUSED.match(one.failure)]
    unchecked, unknown = list(_unchecked(service, observed, target)), unknown_flags(service)
    if refused:
        first = refused[0]
        message = f"{first.name}: {first.failure.removeprefix(f'{CHECK}: ')}"
        yield condition(ARGUMENTS_ACCEPTED, False, "ArgumentRefused", message)
    elif unchecked and unknown:
        message = f"this operator does not know {', '.join(unknown)}; the images decide"
        yield condition(ARGUMENTS_ACCEPTED, None, "UnknownFlag", message)
    elif unchecked:
        message = f"no pod has checked the arguments of {', '.join(unchecked)} yet"
        yield condition(ARGUMENTS_ACCEPTED, None, "NotChecked", message)
    else:
        yield condition(ARGUMENTS_ACCEPTED, True, "Accepted")


def _unchecked(service: Served, observed: Observed, target: str) -> Iterator[str]:
    """Components with arguments that no pod has accepted."""
    for role in ROLES:
        words = worker_arguments(service, role)
        seen = [one.accepted for one in observed.workers() if (one.role, one.revision) == (role, target)]
        if words and not any(accepts(accepted, words) for accepted in seen):
            yield role
    words, gateway = service.spec.gateway.args, observed.deployment(gateway_name(service.name))
    if words and (gateway is None or not accepts(gateway.accepted, words)):
        yield "gateway"


def _transport(service: Served, observed: Observed) -> Condition:
    if not observed.links:
        return condition(TRANSPORT_READY, True, "AsExpected")
    expect = service.spec.transfer.expect
    shown = ", ".join(f"{pair} by {transport}" for pair, transport in sorted(observed.links.items())[:4])
    return condition(
        TRANSPORT_READY,
        False,
        "SlowTransport",
        f"{len(observed.links)} links are slower than spec.transfer.expect={expect}: {shown}",
    )


def _progress(service: Served, observed: Observed, target: str, wanted: Counts) -> Condition:
    old = [one for one in observed.workers() if one.revision != target and (one.replicas or one.pods)]
    new_ready = {
        role: sum(one.ready for one in observed.workers() if one.revision == target and one.role == role)
        for role in ROLES
    }
    if service.spec.rollout.paused:
        return condition(PROGRESSING, False, "Paused", _held(observed, target, bool(old)))
    if old:
        done = ", ".join(f"{new_ready[role]} of {wanted[role]} {role}" for role in ROLES)
        return condition(PROGRESSING, True, "RollingOut", f"revision {target}: {done} workers are ready")
    if any(new_ready[role] < wanted[role] for role in ROLES):
        return condition(PROGRESSING, True, "Starting", f"revision {target} is starting workers")
    return condition(PROGRESSING, False, "Complete", f"revision {target} has all its workers")


def _held(observed: Observed, target: str, several: bool) -> str:
    shown = ", ".join(dict.fromkeys(one.revision for one in observed.workers() if one.revision and one.replicas))
    if several:
        return f"spec.rollout.paused: revisions stay as they are ({shown}; wanted is {target}), workers are only scaled"
    return "spec.rollout.paused: no pod is exchanged for a newer one, workers are only scaled"


def _autoscaling(service: Served, observed: Observed) -> Condition:
    mode = service.spec.autoscaling.mode
    if mode == "none":
        return condition(AUTOSCALING_ACTIVE, False, "Fixed", "spec.autoscaling.mode is none: replicas as written")
    if mode == "external":
        return condition(AUTOSCALING_ACTIVE, False, "External", "an HPA, KEDA or kubectl scale owns the WorkerPools")
    if observed.holding:
        reason = "ReplicasChanged" if observed.holding.startswith(CHANGED_BY_OTHERS) else "MetricsUnavailable"
        return condition(AUTOSCALING_ACTIVE, False, reason, f"workers stay as they are: {observed.holding}")
    is_by_latency = service.spec.slo is not None and (observed.slo is None or observed.slo.is_calibrated)
    return condition(AUTOSCALING_ACTIVE, True, "LatencyObjectives" if is_by_latency else "QueueDepth")


def degraded(observed: Observed, target: str) -> Condition:
    """Whether pods fail, or the canary of the revision `target`."""
    canary = observed.canaries.get(target)
    if canary is not None and not canary.passed:
        return condition(DEGRADED, True, "CanaryFailed", f"revision {target}: {canary.message}")
    failure = next((f"{one.name}: {_with_fix(one.failure)}" for one in observed.deployments if one.failure), "")
    if failure:
        return condition(DEGRADED, True, "PodsFailing", failure)
    return condition(DEGRADED, False, "AllWell")


MAX_SKEWED_SHOWN = 8
"""Pods that one condition names."""


def version_skew(observed: Observed) -> Condition:
    """Whether releases of pods, or of this operator, are too far apart to work together. Gateways send nothing to a
    worker outside their window, and workers outside each other's exchange no KV."""
    releases = observed.releases
    newest, oldest = max([RELEASE, *releases.values()]), min([RELEASE, *releases.values()])
    if newest - oldest <= WINDOW:
        return condition(VERSION_SKEW, False, "WithinWindow", f"releases {oldest} to {newest}" if releases else "")
    named = sorted(releases.items(), key=lambda one: (one[1], one[0]))
    outer = [one for one in named if newest - one[1] > WINDOW or one[1] - oldest > WINDOW]
    half = MAX_SKEWED_SHOWN // 2
    both = outer if len(outer) <= MAX_SKEWED_SHOWN else [*outer[:half], *outer[-half:]]
    shown = ", ".join(f"{pod} ({release})" for pod, release in both)
    more = f" and {len(outer) - len(both)} more" if len(outer) > len(both) else ""
    message = (
        f"releases must be within {WINDOW} of each other: pods {shown}{more}, operator ({RELEASE}); no requests are "
        f"sent between those outside. Update in steps of at most {WINDOW} releases, operator first, then workers, then "
        f"gateways (spec.images), or go back to the images before"
    )
    return condition(VERSION_SKEW, True, "OutsideWindow", message)


def available(kind: str, seen: DeploymentSeen | None, wanted: int, what: str) -> Condition:
    """Whether a pod of a Deployment is ready."""
    ready = seen.ready if seen is not None else 0
    if ready >= 1:
        return condition(kind, True, "Available", f"{ready} of {wanted} {what} pods are ready")
    failure = f": {_with_fix(seen.failure)}" if seen is not None and seen.failure else ""
    return condition(kind, False, "Starting", f"no {what} pod is ready{failure}")
