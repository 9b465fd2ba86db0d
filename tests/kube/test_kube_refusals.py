"""What the API server refuses: every rule and every bound of the schemas, each with a message that names the field.

Nothing is listed twice: rules and bounds are taken from the schemas, and a new rule without a violation here fails.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem_operator.api.crds import crds
from tandem_testing.control_plane import KUBE, ControlPlane
from tandem_testing.custom_resources import (
    model_adapter,
    model_cache,
    model_gateway,
    model_service,
    worker_pool,
)
from tandem_testing.pod_values import POD_VALUES
from tandem_testing.schema_walk import at_path, fields_below, merged, rules_below, schema_of_crd
from tandem_testing.spec_fields import FULL_GATEWAY_SPEC, FULL_SPEC

pytestmark = KUBE

EXAMPLES = Path(__file__).parents[2] / "examples"
CRDS = crds()
CRD_OF = {crd["spec"]["names"]["kind"]: crd for crd in CRDS}
MAKE = {
    "ModelService": model_service,
    "WorkerPool": worker_pool,
    "ModelGateway": model_gateway,
    "ModelAdapter": model_adapter,
    "ModelCache": model_cache,
}
ADAPTER = {"name": "sql", "source": {"claim": {"claimName": "adapters"}}}
ROUTE = {"parentRefs": [{"name": "public"}]}
AROUND = {".spec.adapters[0]": ADAPTER, ".spec.cells[0]": {"service": "west"}}
"""What entries of a list have to have, without which rules within them would not be looked at."""


@dataclass(frozen=True)
class Violation:
    """The part that a rule is about; of a rule about changes also as it was before."""

    now: dict[str, Any]
    before: dict[str, Any] | None = None
    around: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the rest has to have, without which other rules would not be looked at."""


VIOLATIONS = {
    "give exactly one of path, claim, image, huggingFace and cacheRef": Violation(
        {"path": "/m", "claim": {"claimName": "c"}}
    ),
    "the kind of source cannot change: make another ModelService": Violation(
        {"path": None, "claim": {"claimName": "c"}}, before={"path": "/m"}
    ),
    "draftModelPath is needed by DRAFT and EAGLE": Violation({"algorithm": "EAGLE"}),
    "memFractionStatic and kvCacheGib both size the KV pool: give one of them": Violation(
        {"memFractionStatic": 0.5, "kvCacheGib": 4}
    ),
    "minReplicas must not be above maxReplicas": Violation({"minReplicas": 5}),
    "variables that begin with TANDEM_ are set by the operator": Violation({"name": "TANDEM_HOST", "value": "x"}),
    "NVIDIA_VISIBLE_DEVICES is set by the device plugin": Violation({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}),
    'device cuda needs GPUs: add nvidia.com/gpu: "1" to spec.prefill.resources.limits, or take device out': Violation(
        {"engine": {"device": "cuda"}, "decode": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}
    ),
    'device cuda needs GPUs: add nvidia.com/gpu: "1" to spec.decode.resources.limits, or take device out': Violation(
        {"decode": {"engine": {"device": "cuda"}, "resources": {"limits": {"memory": "1Gi"}}}}
    ),
    "slo: no objective; set ttftSeconds or itlSeconds, or remove slo": Violation({"percentile": 0.9}),
    "give value or secretKeyRef, not both": Violation(
        {"name": "A", "value": "x", "secretKeyRef": {"name": "s", "key": "k"}}
    ),
    "labels of tandem.dev/ and app.kubernetes.io/ are set by the operator": Violation(
        {"labels": {"tandem.dev/role": "decode"}}
    ),
    "AppArmor and seccomp profiles are set by the operator": Violation(
        {"annotations": {"container.apparmor.security.beta.kubernetes.io/worker": "unconfined"}}
    ),
    "pageSize, dtype, kvCacheDtype, contextLength, quantization and modelImpl must be equal for both roles: set them "
    "in spec.engine": Violation({"engine": {"dtype": "float32"}}),
    "give managed or external, not both": Violation({"managed": {}, "external": {"url": "redis://r:6379"}}),
    "caSecret is for TLS: a url with rediss": Violation(
        {"url": "redis://r:6379", "caSecret": {"name": "redis", "key": "ca.crt"}}
    ),
    "sentinelPassword is for Sentinels: a url with +sentinel://": Violation(
        {"url": "redis://r:6379", "sentinelPassword": {"name": "redis", "key": "sentinel"}}
    ),
    "sentinelUser needs sentinelPassword": Violation({"url": "redis+sentinel://r/main", "sentinelUser": "reader"}),
    "resource: names of device plugins begin neither with requests. nor with a domain of kubernetes.io": Violation(
        {"resource": "requests.rdma/ib"}
    ),
    "a toleration without key is one of every taint: set operator to Exists": Violation({"value": "x"}),
    "value is for operator Equal": Violation({"key": "a", "operator": "Exists", "value": "x"}),
    "tolerationSeconds is for effect NoExecute": Violation({"key": "a", "tolerationSeconds": 1}),
    "keys of ucx begin with UCX_": Violation({"ucx": {"TLS": "rc"}}),
    "maxSurge and maxUnavailable are both 0: nothing could ever be replaced; raise one": Violation({"maxSurge": 0}),
    "decode.replicas is 0 while prefill has workers: no worker could decode; set both to 0 to stop serving": Violation(
        {"decode": {"replicas": 0}}
    ),
    "metadata.name: a DNS label as of Services: a-z, 0-9 and '-', first a letter, last no '-'": Violation(
        {"metadata": {"name": "chat.v1"}}
    ),
    "path: '..' leads out of the folder; name the folder itself": Violation(
        {"path": "/models/../etc", "mountPath": "/a"}
    ),
    "mountPath: '..' leads out of the folder; name the folder itself": Violation({"path": "/a", "mountPath": "/a/.."}),
    "revision: '..' leads out of the folder; name the folder itself": Violation(
        {"id": "Qwen/Qwen3-8B", "revision": "main/../../other"}
    ),
    "draftModelPath: '..' leads out of the folder; name the folder itself": Violation(
        {"algorithm": "EAGLE", "draftModelPath": "../eagle"}
    ),
    "directory: '..' leads out of the folder; name the folder itself": Violation({"directory": "/nvme/../etc"}),
    "directory is on a volume of the pod: remove claimName and path": Violation({"directory": "/kv", "path": "a"}),
    "sizeLimit is that of a pod's own copy, and with cacheClaim there is none: give one of them": Violation(
        {"id": "Qwen/Qwen3-8B", "sizeLimit": "1Ti", "cacheClaim": "hub"}
    ),
    "backendRequest is longer than request, which ends an attempt; lower it, or set it to 0s": Violation(
        {"request": "30s", "backendRequest": "1m"},
        around={"spec": {"httpRoute": ROUTE, "gateway": {"httpRoute": ROUTE}}},
    ),
    "metadata.name: at most 40 characters, for pods' names begin with it": Violation({"metadata": {"name": "x" * 41}}),
    "routerPolicy is locality, round_robin, least_loaded, power_of_two or session, or prefill=P,decode=P": Violation(
        {"routerPolicy": "prefill=fastest"}
    ),
    "curveSecret cannot change: pods with other keys do not talk to those that run; make another resource": (
        Violation({"curveSecret": "new"}, before={"curveSecret": "old"})
    ),
    "role cannot change: a pool has one role": Violation({"role": "prefill"}, before={"role": "decode"}),
    "serviceName cannot change": Violation({"serviceName": "other"}, before={"serviceName": "chat"}),
    "give exactly one of claim, image and huggingFace": Violation({"image": {"reference": "r/a:1"}}),
    "huggingFace: a branch or tag may change between the starts of two pods; set revision to a commit, or give the "
    "digest": Violation({"source": {"huggingFace": {"id": "a/b", "revision": "main"}}}),
    "adapters: a name is one of aliases; give the adapter another name": Violation(
        {"aliases": ["sql"], "adapters": [ADAPTER]}
    ),
    "adapters: a name is servedModelName; give the adapter another name": Violation(
        {"servedModelName": "sql", "adapters": [ADAPTER]}
    ),
    "serviceName cannot change: make another ModelAdapter": Violation(
        {"serviceName": "other"}, before={"serviceName": "chat"}
    ),
    "node: needs hostPath volumes, which the Pod Security Standard restricted forbids; use claim or newClaim with a "
    "StorageClass that keeps the volume, or a cache of it, on nodes": Violation({"newClaim": None, "node": {"a": 1}}),
    "give exactly one of claim and newClaim": Violation({"claim": {"claimName": "c"}}),
    "the claim cannot change: pods use the weights on it; make another ModelCache": Violation(
        {"claim": {"claimName": "c"}, "newClaim": None}, before={"newClaim": {"size": "1Gi"}}
    ),
    "newClaim: of a claim that exists only size can change; make another ModelCache": Violation(
        {"newClaim": {"accessMode": "ReadWriteOnce"}}, before={"newClaim": {"size": "1Gi"}}
    ),
    "source.huggingFace.id cannot change: make another ModelCache": Violation(
        {"source": {"huggingFace": {"id": "a/other"}}}, before={"source": {"huggingFace": {"id": "a/b"}}}
    ),
    "metadata.name: at most 40 characters, for names of Jobs begin with it": Violation(
        {"metadata": {"name": "x" * 41}}
    ),
    "metadata.name: a DNS label: a-z, 0-9 and '-', first a letter, last no '-'": Violation(
        {"metadata": {"name": "qwen.v1"}}
    ),
    "metadata.name: an adapter has a name of at most 128 characters; give spec.name": Violation(
        {"metadata": {"name": "x" * 129}}
    ),
}
RULES = [(crd["spec"]["names"]["kind"], *rule) for crd in CRDS for rule in rules_below(schema_of_crd(crd))]


@pytest.mark.parametrize(("kind", "path", "message"), RULES, ids=lambda text: text[:40])
def test_every_rule_is_enforced_where_it_stands(control_plane, namespace, kind, path, message):
    assert message in VIOLATIONS, "write down what violates this rule"
    violation = VIOLATIONS[message]
    base = merged(MAKE[kind](namespace), violation.around)
    for place, part in AROUND.items():
        base = merged(base, at_path(place, part)) if path.startswith(place) else base
    if violation.before is not None:
        good = merged(base, at_path(path, violation.before))
        control_plane.apply(good).raise_for_status()
        answer = control_plane.merge(control_plane.path(good), at_path(path, violation.now))
    else:
        bad = merged(base, at_path(path, violation.now))
        answer = tried(control_plane, control_plane.collection(bad), bad)
    assert answer.status_code == 422, answer.text
    assert (path.removeprefix(".") or "<nil>", message) in causes_of(answer), answer.text


def test_no_violation_is_left_over():
    assert set(VIOLATIONS) <= {message for _, _, message in RULES}


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}},
        {"spec": {"decode": {"replicas": 0}, "autoscaling": {"mode": "external"}}},
        {"spec": {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}},
        {"spec": {"prefill": {"scaling": {"minReplicas": 5, "maxReplicas": 5}}}},
        {"spec": {"engine": {"speculation": {"algorithm": "NGRAM"}}}},
        {"spec": {"engine": {"speculation": {"algorithm": "EAGLE", "draftModelPath": "eagle"}}}},
        {"spec": {"redis": {"managed": {}}}},
        {"spec": {"gateway": {"routerPolicy": "prefill=locality,decode=least_loaded"}}},
        {"spec": {"prefill": {"engine": {"tensorParallelSize": 2}}}},
        {"spec": {"engine": {"device": "auto"}}},
        {"spec": {"engine": {"memFractionStatic": 0.5}, "decode": {"engine": {"kvCacheGib": 4}}}},
        {"spec": {"prefill": {"engine": {"device": "cuda"}, "resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}}}},
        {
            "spec": {
                "engine": {"device": "cuda"},
                "prefill": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
                "decode": {"engine": {"device": "cpu"}},
            }
        },
        {"spec": {"decode": {"pod": {"labels": {"team": "search"}}}}},
        {"metadata": {"name": "x" * 40}},
        {"metadata": {"name": "a-1-b2"}},
        {"spec": {"adapters": [ADAPTER], "aliases": ["sql-2"]}},
        {"spec": {"adapters": [{"name": "a.b@c", "source": {"huggingFace": {"id": "a/b", "revision": "c" * 40}}}]}},
        {"spec": {"adapters": [{**ADAPTER, "digest": "0123456789abcdef" * 2}]}},
        {"spec": {"model": {"path": "/models/a..b/.cache/..c"}}},
        {"spec": {"gateway": {"httpRoute": {"parentRefs": [{"name": "g"}], "timeouts": {"backendRequest": "1h30m"}}}}},
        {"spec": {"gateway": {"httpRoute": {"parentRefs": [{"name": "g"}], "timeouts": {"request": "90s"}}}}},
    ],
    ids=str,
)
def test_schema_accepts_values_at_the_limits(control_plane, namespace, change):
    manifest = merged(model_service(namespace), change)
    answer = tried(control_plane, control_plane.collection(manifest), manifest)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("prefill", "replica", 2),
        ("prefill", "hostNetwork", True),
        ("decode", "automountServiceAccountToken", True),
        ("decode", "volumes", [{"name": "root", "hostPath": {"path": "/"}}]),
        ("gateway", "securityContext", {"privileged": True}),
        ("gateway", "hostPID", True),
    ],
)
def test_fields_that_do_not_exist_get_nowhere(control_plane, namespace, part, field, value):
    """Refused by name where the client asks for it, as kubectl does; dropped elsewhere [specs-refused]."""
    manifest = model_service(namespace, **{part: {field: value, "pod": {field: value}}})
    collection = control_plane.collection(manifest)
    refused = control_plane.api.post(collection, json=manifest, params={"fieldValidation": "Strict"})
    assert refused.status_code == 400, refused.text
    assert f'unknown field "spec.{part}.{field}"' in refused.json()["message"]
    assert f'unknown field "spec.{part}.pod.{field}"' in refused.json()["message"]
    kept = control_plane.api.post(collection, json=manifest).raise_for_status().json()["spec"][part]
    assert field not in kept
    assert field not in kept["pod"]


def test_source_may_be_exchanged_for_one_of_its_kind(control_plane, namespace):
    manifest = model_service(namespace)
    control_plane.apply(manifest).raise_for_status()
    manifest["spec"]["model"]["path"] = "/models/other"
    assert control_plane.apply(manifest).status_code == 200


@pytest.mark.parametrize("edge", [one for one in POD_VALUES if one.manifest], ids=lambda one: one.name)
def test_schema_and_api_server_agree_on_values_of_pods(control_plane, namespace, edge):  # [specs-refused]
    """Rules of the schema are asked here; what the operator checks beyond it, in `test_operator_schema.py`."""
    wrong = []
    for kind in ("good", "bad", "stricter"):
        for value in getattr(edge, kind):
            theirs = edge.manifest(value)
            theirs["metadata"]["namespace"] = namespace
            if tried(control_plane, control_plane.collection(theirs), theirs).is_success != (kind != "bad"):
                wrong.append((kind, value, "the API server"))
            ours = model_service(namespace, **edge.spec(value))
            accepted = tried(control_plane, control_plane.collection(ours), ours).is_success
            if (kind == "good" and not accepted) or (kind != "good" and edge.by_rule and accepted):
                wrong.append((kind, value, "the schema"))
    assert wrong == []


def test_every_bound_of_every_field_is_enforced(control_plane, namespace):
    """Of each field that an example sets: wrong type, below, above, too long, too many, none of the list."""
    accepted, known = [], set()
    for base in bases(namespace):
        kind = base["kind"]
        collection = control_plane.collection(base)
        fields = {path: field for path, field in fields_below(schema_of_crd(CRD_OF[kind])) if path.startswith(".spec.")}
        fresh = {(kind, path) for path in fields if value_at(base, path) is not None} - known
        known |= fresh
        for _, field in sorted(fresh):
            for bad in bad_values(fields[field]):
                answer = tried(control_plane, collection, replaced(base, field, bad))
                if answer.status_code != 422 or field.removeprefix(".") not in answer.text:
                    accepted.append((kind, field, bad, answer.status_code))
    assert accepted == [], "\n".join(map(str, accepted))
    everything = {(kind, path) for kind, crd in CRD_OF.items() for path, _ in fields_below(schema_of_crd(crd))}
    elsewhere = re.compile(
        r"\.spec\.(prefill|decode)\.engine\.|\.(decode|gateway|inferencePool|redis\.managed)\.(pod|resources)\."
        r"|^\.spec\.storage\.node$"
    )
    left = {
        (kind, path) for kind, path in everything - known if path.startswith(".spec.") and not elsewhere.search(path)
    }
    assert left == set()


def bases(namespace: str) -> list[dict[str, Any]]:
    """Together they set every field; one for each kind of source and of Redis."""
    manifests = [yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))]
    for manifest in manifests:
        manifest["metadata"]["namespace"] = namespace
    redis = {"resources": {"limits": {"memory": "1Gi"}}, "pod": {"priorityClassName": "serving"}}
    toleration = {"key": "dedicated", "value": "serving", "effect": "NoExecute", "tolerationSeconds": 60}
    secret = {"name": "TOKEN", "secretKeyRef": {"name": "hub", "key": "token"}}
    prefill = {"pod": {"tolerations": [toleration], "env": [secret], "serviceAccountName": "models"}}
    engine = {"kvCacheGib": 4}
    hub = {"huggingFace": {"id": "Qwen/Qwen3-8B", "sizeLimit": "20Gi"}}
    rest = model_service(namespace, redis={"managed": redis}, prefill=prefill, engine=engine, model=hub)
    stored = {"claimName": "kv", "path": "a", "sizeGib": 8, "waitSeconds": 1}
    files = [model_service(namespace, engine={"storage": one}) for one in (stored, {"directory": "/nvme"})]
    listed = yaml.safe_load((EXAMPLES / "adapters.yaml").read_text())["spec"]["adapters"]
    manifests += [model_service(namespace, adapters=[one]) for one in listed]
    adapter = yaml.safe_load((EXAMPLES / "adapters/model-adapter.yaml").read_text())
    adapter["metadata"]["namespace"] = namespace
    adapter["spec"]["digest"] = "0123456789abcdef" * 2
    gateways = model_gateway(namespace, **FULL_GATEWAY_SPEC, inferencePool=FULL_SPEC["gateway"]["inferencePool"])
    host = {"path": "/mnt/models", "mountPath": "/models", "readOnly": True}
    granted = {"serviceAccountName": "models", "hostPaths": [host], "privileged": True}
    pod = {**granted, "env": [secret], "patch": {"spec": {}}, "tolerations": [toleration]}
    managed = model_gateway(namespace, redis={"managed": redis}, pod=pod)
    pool = worker_pool(namespace, replicas=2)
    return [*manifests, rest, *files, pool, gateways, managed, adapter, *caches(namespace)]


def caches(namespace: str) -> list[dict[str, Any]]:
    """One of each kind of storage."""
    example = yaml.safe_load((EXAMPLES / "model-cache/cache.yaml").read_text())
    example["metadata"]["namespace"] = namespace
    source = {"huggingFace": {"id": "a/b", "revision": "v1", "endpoint": "https://mirror.example"}}
    toleration = {"key": "io", "operator": "Equal", "value": "fast", "effect": "NoExecute", "tolerationSeconds": 60}
    download = {
        "image": "me/tandem:1",
        "pullSecrets": ["regcred"],
        "nodeSelector": {"pool": "io"},
        "tolerations": [toleration],
        "runAsUser": 10002,
        "networkPolicy": False,
    }
    storage = {"claim": {"claimName": "nas", "path": "ai"}}
    return [example, model_cache(namespace, source=source, storage=storage, download=download)]


def tried(cluster: ControlPlane, collection: str, manifest: dict[str, Any]) -> httpx.Response:
    """Created without being kept."""
    return cluster.api.post(collection, json=manifest, params={"dryRun": "All"})


def causes_of(answer: httpx.Response) -> set[tuple[str, str]]:
    """Field and message of each cause."""
    causes = answer.json()["details"]["causes"]
    return {(one["field"], one["message"].removeprefix("Invalid value: ")) for one in causes}


def bad_values(field: dict[str, Any]) -> Iterator[Any]:
    """One beyond each bound, and one of another type."""
    if "enum" in field:
        yield "no-such-value" if field["type"] == "string" else max(field["enum"]) + 1
    if "minimum" in field:
        yield field["minimum"] if field.get("exclusiveMinimum") else field["minimum"] - 1
    if "maximum" in field:
        yield field["maximum"] + 1
    if "pattern" in field:
        yield "\x07 ~"
    if "maxLength" in field:
        yield "x" * (field["maxLength"] + 1)
    if field.get("minLength"):
        yield ""
    if "maxItems" in field:
        yield [None] * (field["maxItems"] + 1) if not field["items"].get("type") else entries(field)
    if field.get("minItems"):
        yield []
    if "maxProperties" in field:
        yield {f"key-{number}": "1" for number in range(field["maxProperties"] + 1)}
    if "type" in field:
        yield {"string": 5, "integer": "five", "number": "half", "boolean": "yes", "array": {}, "object": []}[
            field["type"]
        ]


def entries(field: dict[str, Any]) -> list[Any]:
    item = field["items"]
    count = field["maxItems"] + 1
    return [f"x{number}" for number in range(count)] if item.get("type") == "string" else [{} for _ in range(count)]


def value_at(manifest: Any, path: str) -> Any:
    for word in path.split(".")[1:]:
        name, bracket, _ = word.partition("[")
        manifest = manifest.get(name) if isinstance(manifest, dict) else None
        if bracket:
            manifest = manifest[0] if manifest else None
        if manifest is None:
            return None
    return manifest


def replaced(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at `path`, whatever stands there."""
    word, _, rest = path.removeprefix(".").partition(".")
    name, bracket, _ = word.partition("[")
    old = manifest[name]
    if not rest:
        new = [value, *old[1:]] if bracket else value
    elif bracket:
        new = [replaced(old[0], rest, value), *old[1:]]
    else:
        new = replaced(old, rest, value)
    return {**manifest, name: new}
