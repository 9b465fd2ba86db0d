"""The manifest of a sizing is a ModelService."""

import msgspec
import pytest
import yaml

from tandem_lab.sizing.load import Objectives
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.sizing.report import ServiceNames, as_yaml, manifest
from tandem_lab.sizing.search import Cell, Fleet, Score
from tandem_operator.api.model_service import ModelService
from tandem_testing.api_schemas import errors, supported_releases

FLEET = Fleet(
    cell=Cell(
        rates=WorkerRates(
            gpus=4,
            prefill_rate=1e4,
            steps=((1, 0.01),),
            token_bytes=1.0,
            transfer_rate=1e9,
            pool_tokens=1000,
            measured=False,
        ),
        chunk_tokens=2048,
        running=64,
    ),
    prefill=3,
    decode=5,
    score=Score(attainment=0.96, ttft_s=1.0, itl_s=0.02, retractions=0, complete=True),
)
WANTED = Objectives(ttft_s=2.0, itl_s=0.03, percentile=0.95)
SOURCES = [
    {"path": "/models/llama"},
    {"claim": {"claimName": "models", "path": "llama"}},
    {"huggingFace": {"id": "meta-llama/Llama-3.1-8B"}},
]


def written(source: dict) -> dict:
    document = manifest(FLEET, WANTED, ServiceNames(name="llama", source=source), context_length=9000)
    return yaml.safe_load(as_yaml(document, "why\nand how"))


@pytest.mark.parametrize("source", SOURCES)
def test_manifest_is_accepted_by_custom_resource_schema(source):
    document = written(source)
    assert (document["apiVersion"], document["kind"]) == ("tandem.dev/v1beta1", "ModelService")
    assert errors(document, supported_releases()[-1]) == []
    service = msgspec.convert({name: document[name] for name in ("spec",)}, ModelService, strict=True)
    assert (service.spec.prefill.replicas, service.spec.decode.replicas) == (3, 5)
    assert service.spec.engine.max_running_requests == 64


def test_manifest_with_an_unknown_objective_is_not_accepted():
    document = written(SOURCES[0])
    document["spec"]["slo"]["latencySeconds"] = 1.0
    assert errors(document, supported_releases()[-1])


def test_objectives_and_bounds_are_written():
    spec = written(SOURCES[0])["spec"]
    assert spec["slo"] == {"ttftSeconds": 2.0, "itlSeconds": 0.03, "percentile": 0.95, "admission": "observe"}
    assert spec["prefill"]["scaling"] == {"minReplicas": 2, "maxReplicas": 6}
    assert spec["decode"]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert spec["autoscaling"] == {"mode": "internal", "gpuBudget": 64}


def test_comments_come_first_and_are_comments():
    document = manifest(FLEET, WANTED, ServiceNames(name="llama", source=SOURCES[0]), context_length=9000)
    assert as_yaml(document, "a\nb: c").splitlines()[:2] == ["# a", "# b: c"]
