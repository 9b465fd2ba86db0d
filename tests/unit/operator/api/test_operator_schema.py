"""The CRDs say what the classes say, and the examples are what both accept."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema_rs
import kubernetes_validate
import msgspec
import pytest
import yaml

from tandem_operator.api.crds import crds, docstrings_of, schema_of, to_yaml
from tandem_operator.api.model_service import ModelService, ModelServiceSpec
from tandem_operator.api.reference import reference
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import PRIVILEGES, ClusterApis
from tandem_testing.kube_cluster import service_of
from tandem_testing.pod_values import POD_VALUES
from tandem_testing.schema_walk import fields_below

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SERVICE, POOL, GATEWAY, ADAPTER, CACHE = crds()


def schema(crd: dict[str, Any]) -> dict[str, Any]:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields(part: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Every named field below `part`, by its path."""
    found = {}
    for name, one in part.get("properties", {}).items():
        found[f"{path}.{name}"] = one
        found |= fields(one, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if isinstance(part.get(below), dict):
            found |= fields(part[below], path)
    return found


def test_committed_crds_equal_those_of_the_classes():
    committed = (ROOT / "charts/tandem/crds/tandem.dev.yaml").read_text()
    assert committed == to_yaml(crds()), "run python -m tandem_operator.api.crds > charts/tandem/crds/tandem.dev.yaml"


def test_reference_page_matches_the_schema():
    committed = (ROOT / "docs/custom-resources.md").read_text()
    assert committed == reference(), "run python -m tandem_operator.api.reference > docs/custom-resources.md"


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.36"])
@pytest.mark.parametrize(
    "crd", [SERVICE, POOL, GATEWAY, CACHE], ids=["ModelService", "WorkerPool", "ModelGateway", "ModelCache"]
)
def test_definitions_are_strictly_valid(crd, version):
    kubernetes_validate.validate(crd, version, strict=True)


@pytest.mark.parametrize(
    "crd", [SERVICE, POOL, GATEWAY, CACHE], ids=["ModelService", "WorkerPool", "ModelGateway", "ModelCache"]
)
def test_every_field_is_explained(crd):
    bare = [path for path, one in fields(schema(crd)).items() if "description" not in one]
    assert sorted(bare) == [".apiVersion", ".kind", ".metadata"]


@pytest.mark.parametrize(
    "crd", [SERVICE, POOL, GATEWAY, CACHE], ids=["ModelService", "WorkerPool", "ModelGateway", "ModelCache"]
)
def test_strings_lists_and_maps_are_bounded(crd):
    """Unbounded ones make CEL rules too dear for the API server, and objects too big for etcd."""
    for path, one in fields(schema(crd)).items():
        if ".status." in path or path in (".apiVersion", ".kind"):
            continue
        if one.get("type") == "string" and "enum" not in one:
            assert "maxLength" in one, path
        if one.get("type") == "array":
            assert "maxItems" in one, path
        if "additionalProperties" in one:
            assert "maxProperties" in one, path


def test_rules_name_only_fields_that_exist():
    known = {path.rpartition(".")[2] for crd in (SERVICE, POOL, GATEWAY, CACHE) for path in fields(schema(crd))}
    for crd in (SERVICE, POOL, GATEWAY, CACHE):
        for path, part in {"": schema(crd), **fields(schema(crd))}.items():
            for rule in part.get("x-kubernetes-validations", ()):
                used = set(re.findall(r"(?:self|oldSelf)((?:\.[a-zA-Z]+)+)", rule["rule"]))
                for chain in used:
                    for name in chain.strip(".").split("."):
                        assert name in known or name in CEL_WORDS, f"{path}: {name} in {rule['rule']}"


CEL_WORDS = set("all startsWith size matches metadata name memory exists exists_one filter in".split())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_manifest_decodes_to_a_model_service(path):
    manifest = yaml.safe_load(path.read_text())
    assert (manifest.pop("apiVersion"), manifest.pop("kind")) == ("tandem.dev/v1beta1", "ModelService")
    assert len(manifest.pop("metadata")["name"]) <= 40
    msgspec.convert(manifest, ModelService)


def test_full_example_has_every_field():
    """But those that exclude each other, such as adapters on GPUs, and what the same class has elsewhere."""
    spec = yaml.safe_load((ROOT / "examples/full.yaml").read_text())["spec"]
    elsewhere = ("spec.prefill.engine.", "spec.decode.engine.", "spec.gateway.pod.", "spec.gateway.inferencePool.pod.")
    absent = missing(schema(SERVICE)["properties"]["spec"], spec, "spec")
    assert {path for path in absent if not path.startswith(elsewhere)} == {
        "spec.model.path",
        "spec.model.claim",
        "spec.model.huggingFace",
        "spec.model.cacheRef",
        "spec.redis.managed",
        "spec.gatewayRef",
        *("spec.engine.kvCacheGib", "spec.engine.storage"),
        *("spec.adapters", "spec.adapterClaims", "spec.engine.lora"),
        *(f"spec.{role}.pod.{name}" for role in ("prefill", "decode") for name in PRIVILEGED),
    }


PRIVILEGED = ("serviceAccountName", "hostPaths", "privileged")
"""Not for the pods of most: `node-local.yaml` has them."""


def test_every_field_is_in_some_example():
    """What the same class has in one place need not stand in all of them."""
    specs = [yaml.safe_load(file.read_text())["spec"] for file in EXAMPLES]
    given = {of_its_class(path) for spec in specs for path in paths_in(spec)}
    wanted = {of_its_class(path) for path, _ in fields_below(schema(SERVICE)["properties"]["spec"])}
    assert wanted - given == set()


def paths_in(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from paths_in(one, f"{path}[0]")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield f"{path}.{name}"
            yield from paths_in(one, f"{path}.{name}")


def of_its_class(path: str) -> str:
    return re.sub(
        r"^.*\.(pod|resources|scaling)\.", r".\1.", re.sub(r"^\.(prefill|decode)\.engine\.", ".engine.", path)
    )


def missing(part: dict[str, Any], given: Any, path: str) -> set[str]:
    absent = set()
    for name, one in part.get("properties", {}).items():
        if not isinstance(given, dict) or name not in given:
            absent.add(f"{path}.{name}")
            continue
        value = given[name]
        if one.get("type") == "array" and isinstance(value, list):
            together = {key: entry for item in value if isinstance(item, dict) for key, entry in item.items()}
            absent |= missing(one["items"], together, f"{path}.{name}")
        else:
            absent |= missing(one, value, f"{path}.{name}")
    return absent


@pytest.mark.parametrize(
    ("change", "error_message"),
    [
        ({"replica": 2}, "unknown field `replica`"),
        ({"prefill": {"replicas": -1}}, "prefill.replicas"),
        ({"decode": {"replicas": 10_000}}, "decode.replicas"),
        ({"decode": {"replicas": "two"}}, "decode.replicas"),
        ({"engine": {"pageSize": 0}}, "engine.pageSize"),
        ({"engine": {"dtype": "int3"}}, "engine.dtype"),
        ({"model": {"path": "/models;rm -rf"}}, "model.path"),
        ({"model": {"path": "/models\nx"}}, "model.path"),
        ({"model": {"claim": {"claimName": "m", "path": "../etc"}}}, "claim.path"),
        ({"decode": {"scaling": {"targetQueueSeconds": 0}}}, "targetQueueSeconds"),
        ({"prefill": {"pod": {"hostNetwork": True}}}, "hostNetwork"),
        ({"prefill": {"pod": {"securityContext": {"runAsUser": 0}}}}, "securityContext"),
        ({"prefill": {"pod": {"hostPaths": [{"path": "data", "mountPath": "/data"}]}}}, "hostPaths"),
        ({"prefill": {"pod": {"volumes": []}}}, "volumes"),
        ({"security": {"runAsUser": 0}}, "runAsUser"),
    ],
)
def test_bad_specs_are_refused_by_name(change, error_message):  # [specs-refused] [spec-grants-nothing]
    spec = {"model": {"path": "/m"}, **change}
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({"spec": spec}, ModelService)
    assert error_message in str(error.value)


def is_accepted(spec: dict[str, Any]) -> bool:
    """By the classes, and by what the operator checks beyond them."""
    try:
        service = service_of(**spec)
    except msgspec.ValidationError:
        return False
    return not problems_of(service, ClusterApis(http_routes=True), frozenset(PRIVILEGES))


@pytest.mark.parametrize("edge", [one for one in POD_VALUES if not one.by_rule], ids=lambda one: one.name)
def test_value_that_api_server_refuses_in_a_pod_is_refused_in_the_spec(edge):  # [specs-refused]
    """A key without a domain was accepted as an extended resource, until a dry run of the pod refused it."""
    assert [value for value in edge.good if not is_accepted(edge.spec(value))] == []
    assert [value for value in (*edge.bad, *edge.stricter) if is_accepted(edge.spec(value))] == []


def test_resource_of_containers_is_refused_by_name():
    amounts = {"requests": {"hca": 1, "rdma/ib": 1, "hugepages-2Mi": "3Mi"}, "limits": {"hugepages-2Mi": "3Mi"}}
    service = service_of(model={"huggingFace": {"id": "a/b", "resources": amounts}})
    assert problems_of(service, ClusterApis()) == [
        "spec.model.huggingFace.resources.requests[hca]: containers have no such resource; use cpu, memory, "
        "ephemeral-storage, hugepages-SIZE or that of a device plugin with its domain, such as nvidia.com/gpu",
        "spec.model.huggingFace.resources.requests[hugepages-2Mi]: 3Mi is no multiple of 2Mi",
        "spec.model.huggingFace.resources.limits[hugepages-2Mi]: 3Mi is no multiple of 2Mi",
        "spec.model.huggingFace.resources.requests[rdma/ib]: 1 needs an equal limit; set "
        "spec.model.huggingFace.resources.limits[rdma/ib] to it, or remove the request",
    ]


def test_page_sizes_are_those_of_the_engine():
    assert fields(schema(SERVICE))[".spec.engine.pageSize"]["enum"] == [1, 16, 64]


def test_docstrings_of_fields_are_found_through_line_breaks():
    class Sample(msgspec.Struct):
        """A part."""

        first: int = 0
        """Text over
        two lines."""
        second: int = 0

    assert docstrings_of(Sample) == {"first": "Text over two lines."}


def test_number_limits_ignore_cached_equal_annotations():
    class Share(msgspec.Struct):
        share: Annotated[float, msgspec.Meta(ge=0, le=7)]

    limits = schema_of(Share)["properties"]["share"]
    assert [type(limits[name]) for name in ("minimum", "maximum")] == [float, float]


def test_type_without_structural_schema_is_an_error():
    class Loose(msgspec.Struct):
        either: int | str

    with pytest.raises(TypeError, match="union"):
        schema_of(Loose)


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["spec"]["names"]["kind"])
def test_all_versions_have_one_schema_and_the_newest_is_stored(crd):
    """`conversion: None` changes the apiVersion alone: a field of one version would be lost in the other."""
    newest, *former = crd["spec"]["versions"]
    assert crd["spec"]["conversion"] == {"strategy": "None"}
    assert [one["name"] for one in former] == ["v1alpha1"]
    assert (newest["name"], newest["served"], newest["storage"]) == ("v1beta1", True, True)
    for one in former:
        assert one == {**newest, "name": one["name"], "storage": False}


SLO_SCHEMA = jsonschema_rs.Draft4Validator(fields(schema(SERVICE))[".spec.slo"])


@pytest.mark.parametrize(
    "slo",
    [
        {"ttftSeconds": 0},
        {"ttftSeconds": -1},
        {"ttftSeconds": "NaN"},
        {"itlSeconds": 0},
        {"itlSeconds": 100_000},
        {"ttftSeconds": 1, "percentile": 1},
        {"ttftSeconds": 1, "percentile": 0.4},
        {"ttftSeconds": 1, "admission": "drop"},
    ],
)
def test_objectives_out_of_bounds_are_refused(slo):
    assert not SLO_SCHEMA.is_valid(slo)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"model": {"path": "/m"}, "slo": slo}, ModelServiceSpec)


def test_objectives_within_bounds_are_accepted():
    assert SLO_SCHEMA.is_valid({"ttftSeconds": 0.5, "itlSeconds": 0.03, "percentile": 0.999, "admission": "strict"})
    [rule] = fields(schema(SERVICE))[".spec.slo"]["x-kubernetes-validations"]
    assert "set ttftSeconds or itlSeconds" in rule["message"]
