"""Every object that the operator makes: of each example, and of specs with what examples lack.

    examples/  ─▶ ModelService, ModelGateway ─▶ planner ─▶ manifests ─┐
                                             └▶ Secrets, Lease, Event ┴▶ `operator_objects`

`literal_kinds` reads from the sources which kinds they make, so that a new builder without an object here fails a test.
"""

import ast
import asyncio
import importlib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

import tandem_operator
from tandem_operator.api.crds import crds
from tandem_operator.api.model_cache import ModelCacheSpec
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.model_cache import download_job, download_policy, new_claim, prune_job
from tandem_operator.builders.served import Served
from tandem_operator.controller.applier import generated_secret
from tandem_operator.controller.events import EventRecorder, ServiceEvent
from tandem_operator.controller.leader_election import Election, ElectionConfig
from tandem_operator.controller.store import Seen, ServiceKey
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_gateways import behind, gateway_of, plan_of

ROOT = Path(__file__).resolve().parents[3]
NOW = "2026-01-01T00:00:00.000000Z"
OBSERVED = Observed(now=NOW)
APIS = ClusterApis(**{one.name: True for one in fields(ClusterApis) if one.type in (bool, "bool")})
SETTINGS = OperatorSettings(apis=APIS, allow=frozenset(PRIVILEGES))
"""A cluster with each optional interface, and an operator that may do everything."""

MORE_SPECS: dict[str, dict[str, Any]] = {
    "image": {"model": {"image": {"reference": "registry.example/models/chat:1", "path": "chat"}}},
    "pool": {
        "gateway": {"httpRoute": {"parentRefs": [{"name": "public"}]}, "inferencePool": {"replicas": 2}},
        "observability": {"serviceMonitor": True},
    },
}
"""What no example has, by name; each needs the model of `kube_cluster.MINIMAL` unless it names one."""


def examples() -> Iterator[Manifest]:
    """All manifests below examples/: documents with an apiVersion."""
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if isinstance(document, dict) and "apiVersion" in document:
                yield document


@cache
def operator_objects() -> tuple[Manifest, ...]:
    """Each kind, most of them often; pod templates of LeaderWorkerSets as PodTemplates besides."""
    found = [*crds(), *_of_the_operator()]
    for example in examples():
        name, spec = example["metadata"]["name"], example.get("spec", {})
        if example["kind"] == "ModelService":
            found += _of_service(service_of(spec, name=name))
        elif example["kind"] == "ModelGateway":
            found += _of_gateway(gateway_of(spec, name=name))
        elif example["kind"] == "ModelCache":
            found += _of_cache(name, msgspec.convert(spec, ModelCacheSpec))
    for name, spec in MORE_SPECS.items():
        found += _of_service(service_of({"model": {"path": "/models/mini"}, **spec}, name=name))
    return (*found, *_pod_templates(found))


def _of_cache(name: str, spec: ModelCacheSpec) -> Iterator[Manifest]:
    yield download_job(name, "models", spec, SETTINGS)
    yield prune_job(name, "models", spec, SETTINGS, "a" * 40, ["b" * 40])
    yield from new_claim(name, "models", spec)
    yield from download_policy(name, "models", spec, SETTINGS)


def _of_service(service: Served) -> Iterator[Manifest]:
    plan = make_plan(service, OBSERVED, ModelServiceStatus(), 1, SETTINGS)
    invalid = [one.message for one in plan.status.conditions if one.type == "Valid" and one.status == "False"]
    assert not invalid, f"{service.name}: {invalid}"
    yield from plan.apply
    for name in plan.secrets:
        yield generated_secret(ServiceKey(service.namespace, service.name), name)


def _of_gateway(gateway: Served) -> Iterator[Manifest]:
    """With a service that has a model of its own and one on a claim."""
    claimed = behind("search", model={"claim": {"claimName": "models", "path": "search"}})
    plan = plan_of(gateway, behind(), claimed, settings=SETTINGS)
    yield from plan.apply
    for name in plan.secrets:
        yield generated_secret(ServiceKey(gateway.namespace, gateway.name, "ModelGateway"), name)


def _of_the_operator() -> Iterator[Manifest]:
    """What it writes for itself: the Lease of its election and Events."""
    config = ElectionConfig(identity="tandem-operator-0", namespace="tandem-system")
    election = Election(config, lambda: 0.0, lambda: NOW)
    lease = election.attempt(None)
    assert lease is not None
    yield lease
    read = {**lease, "metadata": {**lease["metadata"], "resourceVersion": "1"}}
    for one in (election.attempt(read), election.resignation(read)):
        assert one is not None
        yield one
    posted: list[Manifest] = []

    class Posts:
        async def create(self, manifest: Manifest) -> None:
            posted.append(manifest)

    about = Seen.of(
        {
            "apiVersion": "tandem.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": "chat", "namespace": "models", "uid": "u", "resourceVersion": "7"},
            "spec": {},
        }
    )
    event = ServiceEvent("Normal", "CanaryPassed", "Ready is True: a request went through")
    asyncio.run(EventRecorder(Posts(), "tandem-operator-0").post(about, event))  # type: ignore[arg-type]
    yield from posted


def _pod_templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Of LeaderWorkerSets, whose definition does not look into them."""
    for one in manifests:
        if one["kind"] == "LeaderWorkerSet":
            pair = one["spec"]["leaderWorkerTemplate"]
            for part in ("leaderTemplate", "workerTemplate"):
                metadata = {"name": f"{one['metadata']['name']}-{part.lower()}", "namespace": "models"}
                yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": pair[part]}


def literal_kinds() -> set[str]:
    """Kinds of all objects that the sources of the operator write out: dicts with an apiVersion and a kind."""
    package = Path(tandem_operator.__file__).parent
    found = set()
    for path in sorted(package.rglob("*.py")):
        module = ".".join(("tandem_operator", *path.relative_to(package).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                pairs = {
                    key.value: value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant)
                }
                if {"apiVersion", "kind"} <= pairs.keys() and (kind := _kind(pairs["kind"], module)):
                    found.add(kind)
    return found


def _kind(value: ast.expr, module: str) -> str | None:
    """Of a literal or of a constant of the module, such as `LEASE.name`. None: of an object that was read."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id.isupper():
        return str(getattr(getattr(importlib.import_module(module), value.value.id), value.attr))
    return None
