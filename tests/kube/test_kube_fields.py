"""Every field of ModelServices, ModelGateways, ModelCaches and ModelAdapters is changed on a live object.

A field is seen in the objects that the operator makes, is refused in words that name it, or stands in `ELSEWHERE` with
the reason. What belongs to which field is known from plans of a spec with and without it (`effects`); that all of it is
there, and nothing is left that the field takes away, is read from the API server.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import msgspec

from tandem_operator.api.crds import crds
from tandem_operator.api.model_cache import ModelCacheSpec, ModelCacheStatus
from tandem_operator.api.model_gateway import ModelGatewaySpec, ModelGatewayStatus
from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.builders.naming import ROLE_LABEL, SERVICE_LABEL
from tandem_operator.builders.served import served, served_gateway
from tandem_operator.planning.model_cache import CacheObserved, CacheWanted, make_cache_plan
from tandem_operator.planning.model_gateway import Former, make_gateway_plan, shared_models
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import Changes, make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.changed_fields import OF_BOTH_ROLES, SPECS, Example, Facts, Outcome, effects, facts, places
from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane, neighbour_apis
from tandem_testing.custom_resources import model_adapter, model_cache, model_gateway, model_service
from tandem_testing.kube_objects import lost
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.schema_walk import Schema, fields_below, merged, schema_of_crd
from tandem_testing.spec_fields import Manifest
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

NOW = "2026-01-01T00:00:00Z"
SCALER = "of the autoscaler: test_operator_scaling_config.py"
ELSEWHERE = {
    r"ModelService\.spec\.(prefill|decode)\.scaling\.(?!minReplicas)": SCALER,
    r"ModelService\.spec\.autoscaling\.(?!mode|idleSecondsToZero)": SCALER,
    r"ModelService\.spec\.rollout\.paused": "stops what this test waits for: test_kube_maintenance.py",
    r"ModelService\.spec\.rollout\.history": "of the status: test_operator_plan.py",
    r"ModelService\.spec\.rollout\.canaryTimeoutSeconds": "of the canary book: test_operator_canaries.py",
    r"ModelService\.spec\.adapters\[0\]\.(digest|pinned)": "of commands to workers: test_adapter_sync.py",
    r"ModelService\.spec\.(model|adapters\[0\]\.source)\.image\.": "image volumes: this API server is older than 1.31",
    r"ModelService\.spec\.model\.cacheRef\.": "of a cache with a commit: test_kube_model_cache.py",
    r"ModelGateway\.spec\.images\.engine": "of workers, which a ModelGateway has none of",
    r"ModelGateway\.spec\.tokenizer": "in the models file, of its services: test_kube_tokenizers.py",
    r"ModelAdapter\.spec\.(digest|pinned)": "of commands to workers: test_adapter_sync.py",
    r"ModelAdapter\.spec\.serviceName": "cannot change: test_kube_refusals.py",
}
"""Fields without an effect on an object here, and where they have one."""

POOL = r"ModelGateway\.spec\.inferencePool\."
REFUSED = {
    rf"ModelService{OF_BOTH_ROLES}": "must be equal for both roles: set them in spec.engine",
    POOL: "spec.inferencePool: an endpoint picker selects workers of one model",
    r"ModelCache\.spec\.storage\.node": "node: needs hostPath volumes",
}
"""Fields that are always refused, and the words: by the schema, or in the condition Valid."""

SCHEMAS: Mapping[str, Schema] = {
    crd["spec"]["names"]["kind"]: schema_of_crd(crd)["properties"]["spec"] for crd in crds()
}
MAKE = {"ModelService": model_service, "ModelGateway": model_gateway, "ModelCache": model_cache}
FIXED = {
    "ModelService": r"\.spec\.(model|security\.curveSecret|.*resources)",
    "ModelGateway": r"\.spec\.(security\.curveSecret|.*resources)",
    "ModelCache": r"\.spec\.(source\.huggingFace\.id|storage|.*resources)",
}
"""What is required, cannot change, or has a default of which a part would stay: objects have it from the beginning."""

BAD = (("Valid", "False"), ("Degraded", "True"), ("Failed", "True"))
NEIGHBOURS = ("HTTPRoute", "InferencePool", "PodMonitor", "LeaderWorkerSet")
BUDGETS = "policy/v1beta1"
"""The newest of 1.20."""
KINDS = {
    "Deployment": "apps/v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": BUDGETS,
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "WorkerPool": "tandem.dev/v1beta1",
    "ModelService": "tandem.dev/v1beta1",
    "ModelGateway": "tandem.dev/v1beta1",
    "ModelCache": "tandem.dev/v1beta1",
}
"""What operators make, and what they make it of."""
UNSEEN = ("ConfigMap", "Secret")
"""Kinds whose contents are not only the spec's."""


def fields_of(kind: str) -> set[str]:
    """Those without fields of their own, with the kind."""
    found = fields_below(SCHEMAS[kind], ".spec")
    return {
        f"{kind}{path}"
        for path, part in found
        if "properties" not in part and "properties" not in part.get("items", {})
    }


NAMESPACE = "NAMESPACE"
"""Stands for that of the test, as REVISION for that of a service, so that plans are made once."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An object of one example."""

    kind: str
    name: str
    smallest: Manifest
    """The spec before the change."""
    spec: Manifest


@dataclass(kw_only=True)
class Planned:
    """What operators without canaries, and with every privilege, make of all examples."""

    cases: list[Case]
    whole: Facts
    """All facts of all plans."""
    added: dict[str, Facts]
    """Those of each field."""
    removed: dict[str, Facts]
    """Those that a field takes away."""


@cache
def planned(budgets: str) -> Planned:
    """`budgets`: the API version of disruption budgets."""
    names = ("http_routes", "inference_pools", "pod_monitors", "leader_worker_sets", "model_adapters", "model_caches")
    apis = ClusterApis(pod_disruption_budget=budgets, **dict.fromkeys(names, True))
    settings = OperatorSettings(apis=apis, canaries=False, allow=frozenset(PRIVILEGES))
    found = Planned(cases=[], whole=frozenset(), added={}, removed={})
    for kind, examples in SPECS.items():
        for name, example in examples.items():
            spec = example.spec(SCHEMAS[kind])
            outcome = partial(OUTCOMES[kind], settings, name)
            whole = outcome(spec)
            assert whole is not None, f"{kind} {name} is refused"
            smallest = replace(example, only=f"(?={example.only}){FIXED[kind]}", more={}).spec(SCHEMAS[kind])
            found.cases.append(Case(kind=kind, name=name, smallest=smallest, spec=spec))
            found.whole |= frozenset().union(*(facts(*one) for one in whole.items()))
            for path, at in places(SCHEMAS[kind], spec):
                field = f"{kind}{path}"
                added, removed = effects(spec, at, outcome, whole)
                found.added[field] = found.added.get(field, frozenset()) | added
                found.removed[field] = found.removed.get(field, frozenset()) | removed
    return found


def service_outcome(settings: OperatorSettings, name: str, spec: Manifest) -> Outcome:
    service = served(name, NAMESPACE, msgspec.convert(spec, ModelServiceSpec), settings)
    plan = make_plan(service, Observed(now=NOW), ModelServiceStatus(), 1, settings)
    return outcome_of(plan, {"metadata": {"name": name}, "status": msgspec.to_builtins(plan.status)})


def gateway_outcome(settings: OperatorSettings, name: str, spec: Manifest) -> Outcome:
    gateway = served_gateway(name, NAMESPACE, msgspec.convert(spec, ModelGatewaySpec), settings)
    models = shared_models(gateway, (), Former())
    return outcome_of(make_gateway_plan(gateway, Observed(now=NOW), models, ModelGatewayStatus(), 1, settings))


def cache_outcome(settings: OperatorSettings, name: str, spec: Manifest) -> Outcome:
    wanted = CacheWanted(name=name, namespace=NAMESPACE, spec=msgspec.convert(spec, ModelCacheSpec), generation=1)
    return outcome_of(make_cache_plan(wanted, CacheObserved(now=NOW), ModelCacheStatus(), settings))


OUTCOMES: Mapping[str, Callable[[OperatorSettings, str, Manifest], Outcome]] = {
    "ModelService": service_outcome,
    "ModelGateway": gateway_outcome,
    "ModelCache": cache_outcome,
}


def outcome_of(plan: Changes, service: Manifest | None = None) -> Outcome:
    """Objects of a plan; None for a spec that is refused. `service`: with its status."""
    if not plan.apply:
        return None
    replicas = {scaling.ref.name: {"spec": {"replicas": scaling.replicas}} for scaling in plan.scale}
    manifests = [merged(one, replicas.get(one["metadata"]["name"], {})) for one in plan.apply]
    return shown([*manifests, *([] if service is None else [{**service, "kind": "ModelService"}])])


def shown(manifests: Iterable[Manifest], namespace: str = NAMESPACE) -> dict[str, Manifest]:
    """By kind and name, with what a spec alone decides: no numbers of workers, which a rollout changes one by one."""
    kept, found = list(manifests), dict[str, Manifest]()
    services = (one for one in kept if one["kind"] == "ModelService")
    revisions = {one["metadata"]["name"]: one.get("status", {}).get("revision") for one in services}
    for one in kept:
        revision = revisions.get(one["metadata"].get("labels", {}).get(SERVICE_LABEL))
        text = json.dumps(_decided(one)).replace(namespace, NAMESPACE)
        reduced = json.loads(text.replace(revision, "REVISION") if revision else text)
        found[f"{one['kind']} {reduced['metadata']['name']}"] = reduced
    return {name: one for name, one in found.items() if one["kind"] not in UNSEEN}


def _decided(manifest: Manifest) -> Manifest:
    """Without what depends on what else there is."""
    if manifest["kind"] == "ModelService":
        adapters = manifest.get("status", {}).get("adapters", ())
        kept = [{key: each[key] for key in ("name", "source")} for each in adapters]
        return {**manifest, "spec": {}, "status": {}, "adapters": kept}
    spec = manifest.get("spec", {})
    of_workers = ROLE_LABEL in manifest["metadata"].get("labels", {})
    field = {"Deployment": "replicas", "LeaderWorkerSet": "replicas", "PodDisruptionBudget": "maxUnavailable"}
    dropped = field.get(manifest["kind"]) if of_workers else None
    return {**manifest, "spec": {key: value for key, value in spec.items() if key != dropped}}


def matches(patterns: Iterable[str], field: str) -> bool:
    return any(re.match(one, field) for one in patterns)


def test_every_field_has_an_effect_is_refused_or_is_listed():
    """A field that is added to a schema is here at once, and one that is listed has no other effect."""
    plans = planned(BUDGETS)
    effective = {field for field in plans.added if plans.added[field] or plans.removed[field]}
    ignored = {field for field in plans.added.keys() - effective if not matches(ELSEWHERE, field)}
    assert ignored == set(), "they mean nothing: what the operator makes is equal without them"
    assert {field for field in effective if matches((*ELSEWHERE, *REFUSED), field)} == set(), "they have an effect"
    every = {field for kind in SCHEMAS if kind != "WorkerPool" for field in fields_of(kind)}
    adapters = {f"ModelAdapter{path}" for path, _ in places(SCHEMAS["ModelAdapter"], ADAPTER)}
    left = {one for one in every - plans.added.keys() - adapters if not matches((*ELSEWHERE, *REFUSED), one)}
    assert left == set(), "no example sets them"
    unused = [one for one in (*ELSEWHERE, *REFUSED) if not any(re.match(one, field) for field in every)]
    assert unused == [], "no field has such a name"


def test_every_field_is_changed_on_a_live_object(control_plane, namespace, operator_kubeconfig, tmp_path):
    plans = planned(control_plane.newest("policy/v1", "policy/v1beta1"))
    flags = ("--namespaces", namespace, "--no-leader-elect", "--allow", ",".join(PRIVILEGES))
    with (
        neighbour_apis(control_plane, *NEIGHBOURS),
        operator(operator_kubeconfig, tmp_path / "operator.log", *flags) as running,
    ):
        live = Live(control_plane, namespace)
        control_plane.apply(token_secret(namespace)).raise_for_status()
        for case in plans.cases:
            live.apply(case, case.smallest)
        wait_equal(live.not_observed, [], PATIENCE_S, running.log)
        for case in plans.cases:
            assert lost(case.spec, live.apply(case, case.spec)["spec"]) == [], "its definition drops fields"
        unwanted = frozenset().union(*plans.removed.values()) - plans.whole

        def wrong() -> tuple[list[str], list[str]]:
            found = live.facts()
            return sorted(plans.whole - found), sorted(unwanted & found)

        wait_equal(wrong, ([], []), PATIENCE_S, lambda: f"missing, and still there; {live.errors()}")
        check_model_adapter(Services(control_plane, namespace))
        check_refused_fields(control_plane, namespace)


class Live:
    """The objects of a namespace that operators make, as the API server has them."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        budgets = cluster.newest("policy/v1", "policy/v1beta1")
        self._paths = {
            kind: cluster.collection({"apiVersion": api, "kind": kind, "metadata": {"namespace": namespace}})
            for kind, api in (KINDS | {"PodDisruptionBudget": budgets}).items()
        }

    def apply(self, case: Case, spec: Manifest) -> Manifest:
        """The object as it is stored."""
        manifest = MAKE[case.kind](self._namespace, case.name) | {"spec": spec}
        stored: Manifest = self._cluster.apply(manifest, force=True).raise_for_status().json()
        return stored

    def not_observed(self) -> list[str]:
        """Resources whose status is not of their spec."""
        return [
            f"{one['kind']} {one['metadata']['name']}"
            for one in self._items(SPECS)
            if one.get("status", {}).get("observedGeneration") != one["metadata"]["generation"]
        ]

    def errors(self) -> list[str]:
        """Messages of conditions that say why a plan was not carried out."""
        return [
            f"{one['kind']} {one['metadata']['name']}: {condition['message']}"
            for one in self._items(SPECS)
            for condition in one.get("status", {}).get("conditions", ())
            if (condition["type"], condition["status"])
            in (("Valid", "False"), ("Degraded", "True"), ("Failed", "True"))
        ]

    def facts(self) -> Facts:
        found = shown(self._items(KINDS), self._namespace)
        return frozenset().union(*(facts(*one) for one in found.items()))

    def _items(self, kinds: Iterable[str]) -> list[Manifest]:
        # Items of a list do not say their kind.
        return [{**one, "kind": kind} for kind in kinds for one in self._cluster.get(self._paths[kind])["items"]]


def token_secret(namespace: str) -> Manifest:
    """Named by ModelCaches: they have no Job without it."""
    name = SPECS["ModelCache"]["made"].spec(SCHEMAS["ModelCache"])["source"]["huggingFace"]["tokenSecret"]["name"]
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}}


ADAPTER = {
    "name": "second",
    "source": {"claim": {"claimName": "adapters", "path": "b"}},
    "digest": "0123456789abcdef" * 2,
    "pinned": True,
}


def check_model_adapter(services: Services) -> None:
    """The status of its service has name, claim and path."""
    (claim,) = services.get("managed")["spec"]["adapterClaims"]
    smallest = {"serviceName": "managed", "source": {"claim": {"claimName": claim}}}

    def listed(name: str) -> str | None:
        adapters = services.get("managed")["status"].get("adapters", ())
        return next((one["source"] for one in adapters if one["name"] == name), None)

    services.cluster.apply(model_adapter(services.namespace, "first", **smallest)).raise_for_status()
    wait_equal(lambda: listed("first"), f"claims/{claim}", PATIENCE_S)
    changed = model_adapter(services.namespace, "first", **(smallest | ADAPTER))
    services.cluster.apply(changed).raise_for_status()
    wait_equal(lambda: listed("second"), "claims/adapters/b", PATIENCE_S)


def check_refused_fields(cluster: ControlPlane, namespace: str) -> None:
    """In the words of `REFUSED`: by the schema, those of a ModelGateway by a condition."""
    for pattern, words in REFUSED.items():
        for field in sorted(one for kind in ("ModelService", "ModelCache") for one in fields_of(kind)):
            if re.match(pattern, field):
                kind, _, path = field.partition(".")
                spec = Example(only=re.escape(f".{path}")).spec(SCHEMAS[kind])
                manifest = merged(MAKE[kind](namespace), {"spec": spec})
                answer = cluster.api.post(cluster.collection(manifest), json=manifest, params={"dryRun": "All"})
                assert (answer.status_code, words in answer.text) == (422, True), (field, answer.text)
    spec = Example(only=r"\.spec\.inferencePool").spec(SCHEMAS["ModelGateway"])
    manifest = model_gateway(namespace, "picker", **spec)
    cluster.apply(manifest).raise_for_status()

    def refusal() -> str:
        conditions = cluster.get(cluster.path(manifest)).get("status", {}).get("conditions", ())
        return next((one["message"] for one in conditions if (one["type"], one["status"]) == ("Valid", "False")), "")

    wait_for(lambda: REFUSED[POOL] in refusal(), PATIENCE_S, refusal)
