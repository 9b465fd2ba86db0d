"""Every field of a spec does something: a field that is accepted and means nothing is a promise that is not kept."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_testing.kube_cluster import service_of

SPEC = yaml.safe_load((Path(__file__).parents[4] / "examples/full.yaml").read_text())["spec"]
APIS = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True)
SETTINGS = OperatorSettings(apis=APIS, allow=frozenset(PRIVILEGES))
ELSEWHERE = {
    "images.redis": "of a managed Redis; this one is external",
    "prefill.replicas": "the pools', where somebody scales them",
    "decode.replicas": "the same",
    "autoscaling.periodSeconds": "of the pod poller: test_pod_poller.py",
    "rollout.history": "of a status that has one: test_operator_plan.py",
    "rollout.canaryTimeoutSeconds": "of the canary book: test_operator_canaries.py",
}
WORDS = """
tcp none full error float32 int8 transformers swap ClusterIP Never fcfs write_back
NoExecute FailClose Equal Exists NGRAM NoSchedule internal model strict
512Mi 1 cpu 2h 10.2.0.0/16
rediss+sentinel://elsewhere:1/main/0
""".split()
"""For fields that take one of a few."""

Path_ = tuple[str | int, ...]


def leaves(part: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(part, dict | list):
        for key, one in part.items() if isinstance(part, dict) else enumerate(part):
            yield from leaves(one, (*path, key))
    else:
        yield path, part


def others(value: Any) -> Iterator[Any]:
    """Values that may be in the place of this one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value / 2, 1, 0.75)
    else:
        yield from (f"{value}x", *WORDS)


def replaced(path: Path_, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(SPEC)
    part: Any = spec
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return spec


def outcome(spec: dict[str, Any]) -> tuple[Any, ...]:
    """All that comes of it. Raises where it is no spec."""
    service = service_of(spec)
    observed = Observed(now="2026-01-01T00:00:00Z", pools={"prefill": 2, "decode": 2})
    plan = make_plan(service, observed, ModelServiceStatus(), 1, SETTINGS)
    return plan.apply, plan.scale, plan.secrets, plan.status.conditions, scaling_config(service)


BEFORE = outcome(SPEC)
FIELDS = [(".".join(map(str, path)), path, value) for path, value in leaves(SPEC)]


@pytest.mark.parametrize(("name", "path", "value"), FIELDS, ids=[name for name, _, _ in FIELDS])
def test_another_value_has_another_outcome(name, path, value):
    accepted = 0
    for other in others(value):
        try:
            after = outcome(replaced(path, other))
        except (msgspec.ValidationError, ValueError):
            continue
        accepted += 1
        if after != BEFORE:
            assert name not in ELSEWHERE
            return
    assert accepted, "no other value is accepted: name one in `others`"
    assert name in ELSEWHERE, "it means nothing"
