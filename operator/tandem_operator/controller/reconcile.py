"""One reconciliation of one service: observe, plan, apply.

    deleted? ─▶ bound the time of what remains, forget it       deleted in the foreground? ─▶ report it
    spec ─▶ Observed ─▶ make_plan ─▶ Applier ─▶ events for changes

Level-triggered: it does not matter which event arrived, how often, or whether one was missed.

`costs_before` sets which pods go when a plan removes some: the pods with the least to migrate, whatever caused the
scale-down. Kubernetes deletes the pods of a Deployment with the lowest pod-deletion-cost first, so costs are written
before the number of replicas: for scalings of the autoscaler, a rollout, an HPA and `kubectl scale`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec

from tandem_operator.api.model_adapter import ModelAdapterStatus
from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.naming import ROLE_LABEL, curve_secret_name, redis_secret_name
from tandem_operator.builders.served import Served, served
from tandem_operator.controller.applier import Applier, SecretLookup, pods_that_hold
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.error_reports import ErrorReports, ReconcileResult, rfc3339
from tandem_operator.controller.events import EventRecorder, ServiceEvent, events_for_conditions, events_for_transition
from tandem_operator.controller.model_caches import cache_of
from tandem_operator.controller.model_gateways import gateway_pods, gateway_seen, namesakes
from tandem_operator.controller.observations import (
    Observations,
    ObservationStore,
    Parts,
    canaries_by_readiness,
    model_adapters_of,
)
from tandem_operator.controller.store import (
    DEPLOYMENT,
    WORKER_POOL,
    Seen,
    ServiceKey,
    Store,
    ask_of,
    gateway_name_of,
    generation_of,
    spec_of,
    status_of,
)
from tandem_operator.planning.adapter_status import without_service
from tandem_operator.planning.deletion import FORMER_FINALIZER, drain_bound_s, leaving
from tandem_operator.planning.observed import Canary, DeploymentSeen, Observed
from tandem_operator.planning.plan import Plan, make_plan, refused, wanted_workers
from tandem_operator.planning.status import referenced_secrets
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.autoscaler import changed_costs
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.samples import LoadReading

# Writes the statuses of ModelAdapters, with events for what has changed.


@dataclass(frozen=True, slots=True)
class ModelAdapterStatuses:
    """Of the ModelAdapters that name one service at a time."""

    applier: Applier
    events: EventRecorder

    async def write(self, adapters: Iterable[Seen], statuses: Mapping[str, ModelAdapterStatus]) -> bool:
        """By names of objects. Whether any was written. Raises `ApiError`."""
        wrote = False
        for seen in adapters:
            before, after = ask_of(seen).before, statuses.get(seen.ref.name)
            if after is None or after == before:
                continue
            wrote = True
            try:
                await self.applier.apply_status(seen, msgspec.to_builtins(after))
            except ApiError as error:
                # Deleted in the meantime, or another object has its name by now: its event comes.
                if not (error.absent or error.conflict):
                    raise
                continue
            for event in events_for_conditions(before.conditions, after.conditions):
                await self.events.post(seen, event)
        return wrote

    async def write_without_service(self, known: Iterable[Seen], service: str, now: str) -> bool:
        """Of those whose service is not there. `now`: RFC 3339. As `write`."""
        adapters = model_adapters_of(known)
        return await self.write(adapters, without_service(map(ask_of, adapters), service, now))


DEFAULT_GRACE_S = 30.0
"""Grace period of a pod that does not set one: the default of Kubernetes."""


@dataclass(frozen=True, slots=True)
class FinalizeResult:
    """The result of one step."""

    wrote: bool = False
    again_s: float | None = None


class Finalizer:
    """Bounds the time in which pools of deleted services drain. `clock` is monotonic, so clock jumps have no effect."""

    def __init__(self, applier: Applier, events: EventRecorder, clock: Callable[[], float]) -> None:
        self._applier = applier
        self._events = events
        self._clock = clock
        self._since: dict[ServiceKey, float] = {}

    async def step(self, key: ServiceKey, left: Iterable[Seen]) -> FinalizeResult:
        """`left`: objects with the label of a service that no service of that name owns any more. Raises `ApiError`."""
        left = list(left)
        draining = {pool.uid: pods for pool in left if _is_pool(pool) and (pods := _ending(pool, left))}
        if not draining:
            self.forget(key)
            return FinalizeResult()
        elapsed = self._clock() - self._since.setdefault(key, self._clock())
        bound = drain_bound_s(max(_grace_s(pod) for pods in draining.values() for pod in pods))
        if elapsed < bound:
            return FinalizeResult(again_s=bound - elapsed)
        for pool in (one for one in left if one.uid in draining):
            note = f"gateways did not finish within {bound:.0f} s; remaining requests are aborted"
            await self._events.post(pool, ServiceEvent("Warning", "DrainTimedOut", note))
            await self._applier.delete(pool)
        self.forget(key)
        return FinalizeResult(wrote=True)

    def forget(self, key: ServiceKey) -> None:
        self._since.pop(key, None)


def _is_pool(seen: Seen) -> bool:
    return seen.ref.kind == WORKER_POOL.name and not seen.deleting


def _ending(pool: Seen, left: list[Seen]) -> list[Seen]:
    """The gateway pods that use the pool, if all of them are being deleted. Otherwise the pool continues to serve: the
    service was deleted without its objects (`kubectl delete --cascade=orphan`).
    """
    pods = pods_that_hold(pool, left)
    return pods if all(pod.deleting for pod in pods) else []


def _grace_s(pod: Seen) -> float:
    return float(pod.body["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))


def costs_before(plan: Plan, observed: Observed, pods: Iterable[PodSeen], seen: LoadReading) -> dict[str, int]:
    """New pod-deletion-costs by pod name, of Deployments that shrink and keep some of their pods."""
    wanted = _replicas(plan)
    shrinking = [one for one in observed.workers() if 0 < wanted.get(one.name, one.replicas) < one.replicas]
    costs: dict[str, int] = {}
    listed = list(pods)
    for one in shrinking:
        role = next(role for role in ROLES if role == one.role)
        costs |= changed_costs(_of(one, listed), seen, pools={role}, roles={role})
    return costs


def _replicas(plan: Plan) -> dict[str, int]:
    """Desired replicas of Deployments of workers, by name."""
    wanted = {scaling.ref.name: scaling.replicas for scaling in plan.scale if scaling.ref.kind == DEPLOYMENT.name}
    for manifest in plan.apply:
        if manifest["kind"] == DEPLOYMENT.name and ROLE_LABEL in manifest["metadata"]["labels"]:
            wanted[manifest["metadata"]["name"]] = manifest["spec"]["replicas"]
    return wanted


def _of(deployment: DeploymentSeen, pods: Iterable[PodSeen]) -> list[PodSeen]:
    return [
        pod
        for pod in pods
        if pod.worker_role == deployment.role and pod.revision == deployment.revision and not pod.terminating
    ]


logger = logging.getLogger(__name__)

WAITING_S = 5.0
"""Seconds until the next check of a service that waits for something without a watch: a Secret, a free name."""


class Reconciler:
    """Reconciles services, one call per service at a time."""

    def __init__(
        self,
        store: Store,
        observations: ObservationStore,
        applier: Applier,
        secrets: SecretLookup,
        events: EventRecorder,
        settings: OperatorSettings,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._observations = observations
        self._applier = applier
        self._secrets = secrets
        self._events = events
        self._settings = settings
        self._now = now
        self._finalizer = Finalizer(applier, events, clock)
        self._adapters = ModelAdapterStatuses(applier, events)
        self._reports = ErrorReports(store, applier, events, ModelServiceStatus, now)

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Raises `ApiError` if the API server does not respond or rejects, `NotLeading` if another operator leads now.

        Every error except `NotLeading` becomes a condition and an event of the service before it is raised.
        """
        return await self._reports.guard(key, self._reconcile)

    async def _reconcile(self, key: ServiceKey) -> ReconcileResult:
        service = self._store.service(key)
        known = self._store.parts(key)
        if service is None:
            self._forget(key)
            await self._adapters.write_without_service(known, key.name, rfc3339(self._now()))
            result = await self._finalizer.step(key, known)
            return ReconcileResult(result.wrote, result.again_s)
        service = await self._without_former_finalizer(service)
        parts = Parts.of(service.uid, known)
        if service.deleting:
            status = leaving(status_of(service), generation_of(service), rfc3339(self._now()))
            return ReconcileResult(await self._applier.write_status(service, status))
        # A former service of this name may still drain.
        await self._finalizer.step(key, [one for one in known if one.owner != service.uid])
        if self._observations.of(key) is None:
            # Its pods were not polled yet: a rollout that is half done would look like one that fails. The first poll,
            # seconds after leadership began, triggers the next reconciliation.
            return ReconcileResult()
        return await self._serve(service, parts)

    async def _serve(self, service: Seen, parts: Parts) -> ReconcileResult:
        before, generation = status_of(service), generation_of(service)
        try:
            spec = spec_of(service)
        except ValueError as error:
            plan = refused([str(error)], self._seen(parts, service.key), before, generation)
            return await self._finish(service, parts, before, plan)
        result, waits = await self._follow(service, parts, spec, before)
        return replace(result, again_s=WAITING_S) if waits else result

    async def _follow(
        self, service: Seen, parts: Parts, spec: ModelServiceSpec, before: ModelServiceStatus
    ) -> tuple[ReconcileResult, bool]:
        """Apply the spec; returns whether it waits for something that no watch reports."""
        generation = generation_of(service)
        cache = cache_of(self._store, service)
        claim = None if cache is None else cache.served
        wanted = served(service.ref.name, service.namespace, spec, self._settings, cache=claim)
        observed = replace(await self._observe(wanted, service.key, parts), cache=cache)
        plan = make_plan(wanted, observed, before, generation, self._settings)
        foreign = await self._applier.foreign(service, parts, plan)
        if foreign:
            observed = replace(observed, foreign=foreign)
            plan = make_plan(wanted, observed, before, generation, self._settings)
        missing = [name for name in referenced_secrets(wanted) if name not in observed.secrets]
        await self._note_costs(service, parts, plan, observed)
        return await self._finish(service, parts, before, plan), bool(missing or observed.foreign)

    async def _note_costs(self, service: Seen, parts: Parts, plan: Plan, observed: Observed) -> None:
        observations = self._observations.of(service.key)
        if observations is not None and observations.pods is not None:
            costs = costs_before(plan, observed, parts.pods_seen(), observations.pods)
            await self._applier.annotate_costs(service.namespace, costs)

    async def _finish(self, service: Seen, parts: Parts, before: ModelServiceStatus, plan: Plan) -> ReconcileResult:
        if plan.secrets and parts.pods:
            note = f"Recreated Secrets: {', '.join(plan.secrets)}; running pods use the old ones"
            await self._events.post(service, ServiceEvent("Warning", "SecretsReplaced", note))
        self._reports.planned(service.key, plan.status)
        wrote = await self._applier.apply_plan(service, parts, plan)
        await self._reports.post(service, events_for_transition(before, plan.status))
        wrote |= await self._adapters.write(parts.model_adapters, plan.model_adapters)
        return ReconcileResult(wrote)

    async def _observe(self, wanted: Served, key: ServiceKey, parts: Parts) -> Observed:
        names = {*referenced_secrets(wanted)}
        if wanted.spec.security.curve_secret is None:
            names.add(curve_secret_name(key.name))
        if wanted.spec.redis.managed is not None:
            names.add(redis_secret_name(key.name))
        secrets = await self._secrets.existing(key.namespace, sorted(names))
        observed = replace(
            self._seen(parts, key),
            secrets=secrets,
            foreign=namesakes(self._store, key),
            gateway=gateway_seen(self._store, key, self._settings),
        )
        if wanted_workers(wanted, observed)["prefill"] == 0:
            return replace(observed, canaries=self._by_readiness(key, parts, ("decode",)))
        return observed

    def _by_readiness(self, key: ServiceKey, parts: Parts, roles: Iterable[RoleName] = ROLES) -> dict[str, Canary]:
        service = self._store.service(key)
        shared = () if service is None else gateway_pods(self._store, service)
        return canaries_by_readiness(key.name, parts, roles, shared=shared)

    def _seen(self, parts: Parts, key: ServiceKey) -> Observed:
        observations = self._observations.of(key) or Observations()
        service = self._store.service(key)
        canaries = observations.canaries_through("" if service is None else gateway_name_of(service))
        if not self._settings.canaries:
            canaries = self._by_readiness(key, parts)
        return Observed(
            now=rfc3339(self._now()),
            pools=parts.pools(),
            deployments=parts.deployments(observations.failing),
            owned=parts.removable(),
            canaries=canaries,
            links=observations.links,
            releases=observations.releases,
            decisions=observations.decisions,
            holding=observations.holding,
            slo=observations.slo,
            adapter_requests=parts.adapter_requests(),
            adapters=observations.adapters,
            ready_workers=parts.ready_workers(),
        )

    async def _without_former_finalizer(self, service: Seen) -> Seen:
        finalizers = service.body["metadata"].get("finalizers", [])
        if FORMER_FINALIZER not in finalizers:
            return service
        try:
            await self._applier.set_finalizers(service, [one for one in finalizers if one != FORMER_FINALIZER])
        except ApiError as error:
            # Deleted in the meantime.
            if not error.absent:
                raise
        return self._store.service(service.key) or service

    def _forget(self, key: ServiceKey) -> None:
        self._observations.forget(key)
        self._applier.forget(key)
        self._secrets.forget(key.namespace)
        self._reports.forget(key)
