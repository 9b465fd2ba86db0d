"""Charts as files: what is generated is current, values and schemas know the same fields, a typo is refused."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ROOT / "charts"
NAMES = ("tandem", "tandem-model")
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
GENERATED = ("tandem/README.md", "tandem-model/README.md", "tandem-model/values.schema.json")
SCHEMAS = {name: json.loads((CHARTS / name / "values.schema.json").read_text()) for name in NAMES}
DEFAULTS = {name: yaml.safe_load((CHARTS / name / "values.yaml").read_text()) for name in NAMES}
MODEL = {"model": {"path": "/models/m"}}

each_chart = pytest.mark.parametrize("chart", NAMES)


def objections(chart: str, values: dict[str, Any]) -> list[str]:
    """What helm would say of these values, on top of the chart's own."""
    validator = jsonschema_rs.validator_for(SCHEMAS[chart])
    return [error.message for error in validator.iter_errors({**DEFAULTS[chart], **values})]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("charts")
    command = [sys.executable, str(ROOT / "tools" / "charts" / "write.py"), str(folder)]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    return folder


@pytest.mark.parametrize("path", GENERATED)
def test_generated_chart_files_are_current(written, path):
    assert (written / path).read_text() == (CHARTS / path).read_text(), "run: python tools/charts/write.py"


@each_chart
def test_charts_own_values_fit_its_schema(chart):
    assert objections(chart, {}) == []


@each_chart
def test_every_object_of_the_schema_is_closed_or_a_map(chart):
    """What is neither would let a typo pass."""

    def check(schema: dict[str, Any], path: str) -> None:
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
        for name, one in schema.get("properties", {}).items():
            assert one.get("description"), f"{path}.{name} tells nothing"
            check(one, f"{path}.{name}")
        if isinstance(schema.get("items"), dict):
            check(schema["items"], f"{path}[]")

    check(SCHEMAS[chart], chart)


def test_operators_values_and_schema_know_the_same_fields():
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        assert schema["properties"].keys() - {"global"} == values.keys(), path
        for name, one in schema["properties"].items():
            if "properties" in one and not isinstance(values[name], str) and "$ref" not in one and name != "resources":
                compare(one, values[name], f"{path}.{name}")

    compare(SCHEMAS["tandem"], DEFAULTS["tandem"], "tandem")


@each_chart
def test_every_value_has_a_described_schema(chart):
    """Of values.yaml, at every depth; maps of names that people choose end there."""

    def check(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        for name, value in values.items():
            assert name in schema["properties"], f"{path}.{name} has no schema"
            one = schema["properties"][name]
            assert one.get("description"), f"{path}.{name}"
            if isinstance(value, dict) and "properties" in one:
                check(one, value, f"{path}.{name}")

    check(SCHEMAS[chart], DEFAULTS[chart], chart)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_spec_of_every_example_is_values(path):
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "ModelService":
            assert objections("tandem-model", document["spec"]) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prefil": {"replicas": 2}}, "'prefil' was unexpected"),
        ({"prefill": {"replica": 2}}, "'replica' was unexpected"),
        ({"decode": {"replicas": -1}}, "-1 is less than the minimum of 0"),
        ({"decode": {"replicas": "two"}}, '"two" is not of type "integer"'),
        ({"decode": {"pod": {"hostNetwork": True}}}, "'hostNetwork' was unexpected"),
        ({"decode": {"pod": {"tolerations": [{"keys": "gpu"}]}}}, "'keys' was unexpected"),
        ({"engine": {"pageSize": 7}}, "7 is not one of 1, 16 or 64"),
        ({"engine": {"memFractionStatic": 0}}, "0 is less than or equal to the minimum of 0"),
        ({"model": {"path": "/a", "claim": {"claimName": "b"}}}, "has more than 1 property"),
        ({"model": {"path": "/a; rm -rf /"}}, "does not match"),
        ({"model": {"claim": {}}}, '"claimName" is a required property'),
        ({"nameOverride": "a" * 41}, "is longer than 40 characters"),
        ({"gateway": {"httpRoute": {"parentRefs": [{"nam": "x"}]}}}, "'nam' was unexpected"),
    ],
    ids=str,
)
def test_model_chart_refuses(values, words):
    found = objections("tandem-model", MODEL | values)
    assert any(words in one for one in found), found


@pytest.mark.parametrize(
    "values",
    [
        {"scop": "Cluster"},
        {"scope": "cluster"},
        {"namespaces": ["Not_A_Name"]},
        {"replicas": 0},
        {"image": {"digest": "sha256:short"}},
        {"runAsUser": 0},
        {"metrics": {"monitor": True}},
        {"extraArgs": ["-v"]},
        {"podLabels": {"a": 1}},
        {"resources": {"limits": {"memory": "lots"}}},
        {"tolerations": [{"key": "control", "effekt": "NoSchedule"}]},
    ],
    ids=str,
)
def test_operators_chart_refuses(values):
    assert len(objections("tandem", values)) >= 1


@each_chart
def test_versions_are_the_products(chart):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)
