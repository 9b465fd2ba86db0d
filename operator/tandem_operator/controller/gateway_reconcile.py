"""One reconciliation of one ModelGateway: the services that refer to it, plan, apply, events.

    ModelServices with its name ─▶ `Referring`, with their keys and passwords ─▶ make_gateway_plan ─▶ Applier
                                                                             ─▶ events for services that come and go

Deletion needs no part of this: garbage collection deletes its objects, and its gateways drain within their grace
period. The services behind it continue, and report `GatewayMissing`.
"""

import base64
import binascii
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tandem_operator.api.model_gateway import ModelGatewayStatus, ReferringService
from tandem_operator.builders.models_file import MODELS_FILE, fleet_files
from tandem_operator.builders.naming import curve_secret_name, fleets_secret_name, models_name, redis_secret_name
from tandem_operator.builders.served import Served, served, served_gateway
from tandem_operator.builders.worker import CURVE_KEY
from tandem_operator.controller.applier import RECHECK_S, Applier, SecretLookup
from tandem_operator.controller.cache_reconcile import CacheReconciler
from tandem_operator.controller.error_reports import ErrorReports, ReconcileResult, rfc3339
from tandem_operator.controller.events import EventRecorder, ServiceEvent, events_for_conditions
from tandem_operator.controller.model_caches import cache_of
from tandem_operator.controller.model_gateways import namesakes
from tandem_operator.controller.observations import Parts
from tandem_operator.controller.reconcile import WAITING_S, Reconciler
from tandem_operator.controller.roots import root_of
from tandem_operator.controller.store import (
    CONFIG_MAP,
    MODEL_CACHE,
    MODEL_GATEWAY,
    SECRET,
    Seen,
    ServiceKey,
    Store,
    gateway_spec_of,
    spec_of,
)
from tandem_operator.planning.model_gateway import (
    Former,
    GatewayPlan,
    Referring,
    make_gateway_plan,
    refused_gateway,
    shared_models,
)
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.status import referenced_secrets
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True)
class EveryReconciler:
    """Reconciles all kinds."""

    services: Reconciler
    gateways: "GatewayReconciler"
    caches: CacheReconciler

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Raises `ApiError` and `NotLeading`."""
        if key.kind == MODEL_GATEWAY.name:
            return await self.gateways.reconcile(key)
        if key.kind == MODEL_CACHE.name:
            return await self.caches.reconcile(key)
        return await self.services.reconcile(key)


class GatewayReconciler:
    """Reconciles ModelGateways, one call per ModelGateway at a time."""

    def __init__(
        self,
        store: Store,
        applier: Applier,
        secrets: SecretLookup,
        events: EventRecorder,
        settings: OperatorSettings,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._applier = applier
        self._secrets = secrets
        self._settings = settings
        self._now = now
        self._clock = clock
        self._copies: dict[ServiceKey, tuple[float, Mapping[str, str]]] = {}
        """What the Secrets of gateways had, and when they were read."""
        self._reports = ErrorReports(store, applier, events, ModelGatewayStatus, now)

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Raises `ApiError` and `NotLeading`, as `Reconciler.reconcile`."""
        return await self._reports.guard(key, self._reconcile)

    async def _reconcile(self, key: ServiceKey) -> ReconcileResult:
        root = root_of(self._store, key, ModelGatewayStatus, self._forget)
        if root is None:
            return ReconcileResult()
        gateway, before, generation = root.seen, root.before, root.generation
        former = await self._former(gateway)
        parts = Parts.of(gateway.uid, self._store.parts(key))
        try:
            spec = gateway_spec_of(gateway)
        except ValueError as error:
            plan = refused_gateway([str(error)], self._seen(parts), before, generation)
            return await self._finish(gateway, parts, before, plan)
        wanted = served_gateway(key.name, key.namespace, spec, self._settings)
        referring = [await self._referring(seen) for seen in self._store.behind(key) if not seen.deleting]
        models = shared_models(wanted, referring, former)
        observed = await self._observe(wanted, parts, key)
        plan = make_gateway_plan(wanted, observed, models, before, generation, self._settings)
        foreign = await self._applier.foreign(gateway, parts, plan)
        if foreign:
            observed = replace(observed, foreign=foreign)
            plan = make_gateway_plan(wanted, observed, models, before, generation, self._settings)
        result = await self._finish(gateway, parts, before, plan)
        missing = [name for name in referenced_secrets(wanted) if name not in observed.secrets]
        waits = missing or observed.foreign or any(one.reason == "SecretMissing" for one in referring)
        return replace(result, again_s=WAITING_S) if waits else result

    async def _finish(
        self, gateway: Seen, parts: Parts, before: ModelGatewayStatus, plan: GatewayPlan
    ) -> ReconcileResult:
        self._reports.planned(gateway.key, plan.status)
        wrote = await self._applier.apply_plan(gateway, parts, plan)
        if wrote:
            self._copies.pop(gateway.key, None)
        changes = events_for_conditions(before.conditions, plan.status.conditions)
        await self._reports.post(gateway, [*changes, *service_events(before.services, plan.status.services)])
        return ReconcileResult(wrote)

    async def _former(self, gateway: Seen) -> Former:
        """What the gateways were given last. A Secret that was deleted or edited by hand is written again."""
        copied = self._copies.get(gateway.key)
        if copied is None or self._clock() - copied[0] >= RECHECK_S:
            copied = (self._clock(), await self._read_copy(gateway))
            self._copies[gateway.key] = copied
        known = {seen.ref: seen for seen in self._store.parts(gateway.key)}
        models = known.get(CONFIG_MAP.ref(models_name(gateway.ref.name)))
        text = "" if models is None else models.body.get("data", {}).get(MODELS_FILE, "")
        return Former.of(text, copied[1])

    async def _read_copy(self, gateway: Seen) -> Mapping[str, str]:
        """Contents of the Secret that its gateways mount."""
        ref = SECRET.ref(fleets_secret_name(gateway.ref.name))
        secret = await self._secrets.read(gateway.namespace, ref.name)
        seen = None if secret is None else Seen.of(secret)
        if secret is not None and seen is not None and seen.owner == gateway.uid:
            self._store.put(seen)
            data: Mapping[str, str] = secret.get("data", {})
            return data
        for stored in self._store.parts(gateway.key):
            if stored.ref == ref:
                self._store.drop(stored)
        return {}

    async def _referring(self, seen: Seen) -> Referring:
        created = seen.body["metadata"].get("creationTimestamp", "")
        try:
            cache = cache_of(self._store, seen)
            claim = None if cache is None else cache.served
            service = served(seen.ref.name, seen.namespace, spec_of(seen), self._settings, cache=claim)
        except ValueError as error:
            return Referring(
                name=seen.ref.name, created=created, service=None, reason="InvalidSpec", message=str(error)
            )
        one = Referring(name=seen.ref.name, created=created, service=service)
        if cache is not None and cache.served is None:
            message = f"ModelCache {cache.name!r} has no whole commit yet; the service's ModelCached says why"
            return replace(one, reason="CachePending", message=message)
        problems = problems_of(service, self._settings.apis, self._settings.allow)
        if problems:
            return replace(one, reason="InvalidSpec", message="; ".join(problems)[:1024])
        return await self._with_files(one, service)

    async def _with_files(self, one: Referring, service: Served) -> Referring:
        """With keys and passwords, or the reason why they are not there."""
        keys = (await self._secrets.contents(service.namespace, service.curve_secret) or {}).get(CURVE_KEY)
        if keys is None:
            return replace(one, reason="SecretMissing", message=_missing(service.curve_secret, CURVE_KEY))
        try:
            files = tuple(fleet_files(service, base64.b64decode(keys)))
        except binascii.Error:
            return replace(one, reason="SecretMissing", message=_missing(service.curve_secret, CURVE_KEY))
        contents: dict[str, str] = {}
        for file in files:
            found = (await self._secrets.contents(service.namespace, file.source.name) or {}).get(file.source.key)
            if found is None:
                return replace(one, reason="SecretMissing", message=_missing(file.source.name, file.source.key))
            contents[file.name] = found
        return replace(one, files=files, contents=contents)

    async def _observe(self, wanted: Served, parts: Parts, key: ServiceKey) -> Observed:
        names = {*referenced_secrets(wanted)}
        if wanted.spec.security.curve_secret is None:
            names.add(curve_secret_name(key.name))
        if wanted.spec.redis.managed is not None:
            names.add(redis_secret_name(key.name))
        secrets = await self._secrets.existing(key.namespace, sorted(names))
        return replace(self._seen(parts), secrets=secrets, foreign=namesakes(self._store, key))

    def _seen(self, parts: Parts) -> Observed:
        return Observed(now=rfc3339(self._now()), deployments=parts.deployments(), owned=parts.removable())

    def _forget(self, key: ServiceKey) -> None:
        # Nothing lists Secrets, so nothing else reports that it is gone.
        for seen in self._store.parts(key):
            if seen.ref.kind == SECRET.name:
                self._store.drop(seen)
        self._copies.pop(key, None)
        self._applier.forget(key)
        self._secrets.forget(key.namespace)
        self._reports.forget(key)


def _missing(secret: str, key: str) -> str:
    return f"Secret {secret!r} with key {key!r} does not exist yet"


def service_events(before: Iterable[ReferringService], after: Iterable[ReferringService]) -> list[ServiceEvent]:
    """Services that came, went, or are refused for another reason than before."""
    old, new = ({one.name: one for one in services} for services in (before, after))
    events = []
    for name, one in new.items():
        was = old.get(name)
        if one.reason and (was is None or one.reason != was.reason):
            events.append(ServiceEvent("Warning", one.reason, f"ModelService {name!r}: {one.message}"))
        elif one.served and (was is None or not was.served or was.reason) and not one.reason:
            models = ", ".join(one.models)
            events.append(ServiceEvent("Normal", "ServiceAdded", f"ModelService {name!r} is served as {models}"))
    gone = [name for name, one in old.items() if one.served and (name not in new or not new[name].served)]
    events += [ServiceEvent("Normal", "ServiceRemoved", f"ModelService {name!r} is no longer served") for name in gone]
    return events
