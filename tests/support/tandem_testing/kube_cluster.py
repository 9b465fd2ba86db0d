"""A cluster of the mind for the planner: applies plans to counts and lets Deployments come up on demand.

It knows no more of Kubernetes than the planner sees. What the API server really does with the manifests is tested
against a real one.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.api.sources import ClaimSource
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL
from tandem_operator.builders.served import Served, served
from tandem_operator.planning.observed import Canary, DeploymentSeen, Observed, Ref
from tandem_operator.planning.plan import Plan, make_plan
from tandem_operator.settings import OperatorSettings

COMMIT = "c" * 40
MINIMAL: dict[str, Any] = {"model": {"path": "/models/tandem-mini"}}


def service_of(spec: dict[str, Any] | None = None, *, name: str = "chat", **fields: Any) -> Served:
    """A service from a spec as people write it; `fields` are added to the minimal one. A ModelCache that it names has a
    commit.
    """
    body = spec if spec is not None else {**MINIMAL, **fields}
    given = msgspec.convert(body, ModelServiceSpec)
    cache = given.model.cache_ref
    claim = None if cache is None else ClaimSource(claim_name=cache.name, path=f"tandem-cache/{cache.name}/{COMMIT}")
    return served(name, "models", given, OperatorSettings(), cache=claim)


@dataclass
class KubeCluster:
    """Objects by reference, Deployments with their pods."""

    settings: OperatorSettings = field(default_factory=OperatorSettings)
    objects: dict[Ref, dict[str, Any]] = field(default_factory=dict)
    deployments: dict[str, DeploymentSeen] = field(default_factory=dict)
    pools: dict[str, int] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    canaries: dict[str, Canary] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    status: ModelServiceStatus = field(default_factory=ModelServiceStatus)
    clock: int = 0

    def observed(self) -> Observed:
        return Observed(
            now=f"2026-01-01T00:{self.clock // 60:02}:{self.clock % 60:02}Z",
            pools=dict(self.pools),  # type: ignore[arg-type]
            deployments=tuple(self.deployments.values()),
            secrets=frozenset(self.secrets),
            owned=frozenset(ref for ref in self.objects if ref.kind != "WorkerPool"),
            canaries=dict(self.canaries),
            links=dict(self.links),
        )

    def plan(self, service: Served) -> Plan:
        return make_plan(service, self.observed(), self.status, 1, self.settings)

    def reconcile(self, service: Served) -> Plan:
        """Carry out one plan."""
        self.clock += 1
        plan = self.plan(service)
        self.secrets.update(plan.secrets)
        for manifest in plan.apply:
            self._apply(manifest)
        for scaling in plan.scale:
            if scaling.ref.kind == "WorkerPool":
                self.pools[scaling.ref.name.rpartition("-")[2]] = scaling.replicas
            else:
                self._resize(scaling.ref.name, scaling.replicas)
        for ref in plan.delete:
            del self.objects[ref]
            self.deployments.pop(ref.name, None)
        self.status = plan.status
        return plan

    def start_everything(self) -> None:
        """All pods that are wanted run and are ready, and canaries pass."""
        for name, one in self.deployments.items():
            self.deployments[name] = replace(one, ready=one.replicas, pods=one.replicas)
        self.canaries = {one.revision or "": Canary(passed=True) for one in self.deployments.values() if one.ready}

    def settle(self, service: Served) -> None:
        """Until nothing changes any more."""
        for _ in range(100):
            before = (dict(self.objects), dict(self.deployments), self.status)
            self.start_everything()
            self.reconcile(service)
            if (self.objects, self.deployments, self.status) == before:
                return
        raise AssertionError("the plans have no end")

    def _apply(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        self.objects[Ref(api_version=manifest["apiVersion"], kind=manifest["kind"], name=name)] = manifest
        if manifest["kind"] not in ("Deployment", "LeaderWorkerSet"):
            return
        labels = manifest["metadata"]["labels"]
        self.clock += 1
        if name not in self.deployments:
            self.deployments[name] = DeploymentSeen(
                name=name,
                api_version=manifest["apiVersion"],
                kind=manifest["kind"],
                replicas=0,
                role=labels.get(ROLE_LABEL),
                revision=labels.get(REVISION_LABEL),
                created=f"2026-01-01T00:{self.clock // 60:02}:{self.clock % 60:02}Z",
            )
        paused = manifest["spec"].get("paused", False)
        self.deployments[name] = replace(self.deployments[name], paused=paused)
        self._resize(name, manifest["spec"]["replicas"])

    def _resize(self, name: str, replicas: int) -> None:
        one = self.deployments[name]
        self.deployments[name] = replace(
            one, replicas=replicas, pods=max(one.pods, replicas), ready=min(one.ready, replicas)
        )
