"""One reconciliation of one ModelCache: its Jobs and their pods, the workers that use its commits, plan, apply, events.

Deletion needs no part of this: garbage collection deletes the Jobs, the policy and the claim, which Kubernetes keeps as
long as pods use it.

`CachePoller` reads the progress of downloads every few seconds; reconciles only show what it has read.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import httpx

from tandem_operator.api.model_cache import ModelCacheSpec, ModelCacheStatus
from tandem_operator.builders.model_cache import claim_name_of
from tandem_operator.controller.applier import Applier, SecretLookup
from tandem_operator.controller.error_reports import ErrorReports, ReconcileResult, rfc3339
from tandem_operator.controller.events import EventRecorder, events_for_conditions
from tandem_operator.controller.model_caches import (
    directories_in_use,
    directories_of_gateways,
    has_former_writers,
    jobs_of,
    policies_of,
    progress_url,
)
from tandem_operator.controller.observations import Parts
from tandem_operator.controller.roots import root_of
from tandem_operator.controller.store import Seen, ServiceKey, Store, cache_spec_of
from tandem_operator.planning.model_cache import (
    CacheObserved,
    CachePlan,
    CacheWanted,
    ProgressReading,
    make_cache_plan,
    refused_cache,
)
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.pods import AT_ONCE, fetch_progress

RECHECK_S = 60.0
"""While something is waited for that no watch reports: a Secret, the time after which a Job is tried again."""

POLL_S = 5.0


class CachePoller:
    """Reads the progress of all downloads in the task of `run`. Calls `changed` for one that has another."""

    def __init__(
        self,
        store: Store,
        client: httpx.AsyncClient,
        *,
        leading: Callable[[], bool],
        changed: Callable[[ServiceKey], None],
    ) -> None:
        self._store = store
        self._client = client
        self._leading = leading
        self._changed = changed
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._of: dict[ServiceKey, ProgressReading] = {}

    def of(self, key: ServiceKey) -> ProgressReading:
        """As last read; empty without a download."""
        return self._of.get(key, ProgressReading())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._leading():
                await self.once()
            await asyncio.sleep(POLL_S)

    async def once(self) -> None:
        """All of them."""
        urls = {seen.key: progress_url(self._store.parts(seen.key)) for seen in self._store.caches()}
        for key in self._of.keys() - {key for key, url in urls.items() if url is not None}:
            del self._of[key]
        await asyncio.gather(*(self._read(key, url) for key, url in urls.items() if url is not None))

    async def _read(self, key: ServiceKey, url: str) -> None:
        async with self._slots:
            reading = await fetch_progress(self._client, url)
        if reading is not None and reading != self._of.get(key):
            self._of[key] = reading
            self._changed(key)


class CacheReconciler:
    """Reconciles ModelCaches, one call per ModelCache at a time."""

    def __init__(
        self,
        store: Store,
        applier: Applier,
        secrets: SecretLookup,
        events: EventRecorder,
        settings: OperatorSettings,
        progress: Callable[[ServiceKey], ProgressReading],
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._applier = applier
        self._secrets = secrets
        self._settings = settings
        self._progress = progress
        self._now = now
        self._reports = ErrorReports(store, applier, events, ModelCacheStatus, now)

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Raises `ApiError` and `NotLeading`, as `Reconciler.reconcile`."""
        return await self._reports.guard(key, self._reconcile)

    async def _reconcile(self, key: ServiceKey) -> ReconcileResult:
        root = root_of(self._store, key, ModelCacheStatus, self._forget)
        if root is None:
            return ReconcileResult()
        cache, before, generation = root.seen, root.before, root.generation
        parts = Parts.of(cache.uid, self._store.parts(key))
        try:
            spec = cache_spec_of(cache)
        except ValueError as error:
            plan = refused_cache([str(error)], rfc3339(self._now()), before, generation)
            return await self._finish(cache, parts, before, plan)
        wanted = CacheWanted(name=key.name, namespace=key.namespace, spec=spec, generation=generation)
        observed = await self._observe(cache, spec, before)
        plan = make_cache_plan(wanted, observed, before, self._settings)
        foreign = await self._applier.foreign(cache, parts, plan)
        if foreign:
            plan = make_cache_plan(wanted, replace(observed, foreign=foreign), before, self._settings)
        result = await self._finish(cache, parts, before, plan)
        return replace(result, again_s=RECHECK_S) if _waits(plan.status) or foreign else result

    async def _observe(self, cache: Seen, spec: ModelCacheSpec, before: ModelCacheStatus) -> CacheObserved:
        known, key = self._store.parts(cache.key), cache.key
        token = spec.source.hugging_face.token_secret
        found = frozenset[str]() if token is None else await self._secrets.existing(key.namespace, [token.name])
        used = frozenset[str]()
        if len(before.commits) > 1:
            # Others than the one that services get.
            claim = claim_name_of(key.name, spec)
            used = directories_in_use(self._store.workloads(key.namespace), claim)
            used |= directories_of_gateways(self._store.model_files(key.namespace), claim)
        return CacheObserved(
            now=rfc3339(self._now()),
            jobs=jobs_of(known, cache.uid),
            ending=has_former_writers(known, cache.uid),
            token_missing=token is not None and token.name not in found,
            progress=self._progress(key),
            used=used,
            policies=policies_of(known, cache.uid),
        )

    async def _finish(self, cache: Seen, parts: Parts, before: ModelCacheStatus, plan: CachePlan) -> ReconcileResult:
        self._reports.planned(cache.key, plan.status)
        wrote = False
        if plan.delete:
            # A Job goes only after its result is in the status.
            wrote = await self._applier.write_status(cache, plan.status)
            cache = self._store.service(cache.key) or cache
        wrote |= await self._applier.apply_plan(cache, parts, plan)
        await self._reports.post(cache, events_for_conditions(before.conditions, plan.status.conditions))
        return ReconcileResult(wrote)

    def _forget(self, key: ServiceKey) -> None:
        self._applier.forget(key)
        self._reports.forget(key)


def _waits(status: ModelCacheStatus) -> bool:
    return status.state != "Ready" or len(status.commits) > 1
