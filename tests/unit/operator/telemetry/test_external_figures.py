"""What HPA and KEDA scale by: the figures, and the examples that use them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tandem_operator.builders.naming import pool_name
from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_operator.telemetry.external import LEAST, PREFIX, ScalingMetrics
from tandem_operator.telemetry.samples import LoadReading
from tandem_testing.kube_cluster import service_of

EXAMPLES = Path(__file__).parents[4] / "examples" / "scaling"
NAME = ("models", "chat")
CONFIG = scaling_config(service_of())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def load(**changes: Any) -> Load:
    values = {"tokens_per_s": 0.0, "running": 0.0, "waiting": 0.0, "queued": 0.0, "held": 0.0, "age_s": 1.0, **changes}
    return Load(
        at=100.0,
        age_s=values["age_s"],
        prefill=PrefillLoad(
            queued_tokens=values["queued"],
            oldest_wait_s=2.0,
            arrived_tokens_per_s=values["tokens_per_s"],
            worker_tokens_per_s=1000,
        ),
        decode=DecodeLoad(
            running=values["running"],
            waiting=values["waiting"],
            oldest_wait_s=3.0,
            arrived_per_s=0,
            seconds_each=10,
            worker_places=10,
            used_pages=150,
            worker_pages=100,
        ),
        held=values["held"],
    )


def figures_of(what: Load | None, reason: str = "") -> ScalingMetrics:
    figures = ScalingMetrics()
    figures.put(NAME, LoadReading(load=what, reason=reason), CONFIG)
    return figures


def value(figures: ScalingMetrics, name: str, role: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(figures)
    labels = {"service_namespace": "models", "model_service": "chat", "role": role}
    return registry.get_sample_value(PREFIX + name, labels)


def test_need_of_each_role_is_served_in_both_forms():
    figures = figures_of(load(tokens_per_s=2500, running=12))
    assert value(figures, "workers_needed", "prefill") == 2.5
    status, document = figures.answer(*NAME, "prefill")
    assert (status, document["workersNeeded"], document["oldestWaitSeconds"]) == (200, 2.5, 2.0)
    assert value(figures, "kv_usage", "decode") == 1.5
    assert "2500 tokens/s come" in str(document["reason"])


def test_external_figures_scale_both_roles_from_and_to_zero_together():
    held = figures_of(load(held=1, waiting=1, queued=5))
    assert all(value(held, "workers_needed", role) >= LEAST for role in ("prefill", "decode"))
    running = figures_of(load(running=1))
    assert value(running, "workers_needed", "prefill") == LEAST, "decode runs: the pair stays"
    idle = figures_of(load())
    assert value(idle, "workers_needed", "prefill") == 0.0


@pytest.mark.parametrize(("what", "reason"), [(None, "no gateway reports its queue"), (load(age_s=60.0), "60 s old")])
def test_unreliable_metrics_are_not_served(what, reason):  # [figures-or-hold]
    figures = figures_of(load(running=3))
    figures.put(NAME, LoadReading(load=what, reason=reason), CONFIG)
    assert value(figures, "workers_needed", "decode") is None
    status, document = figures.answer(*NAME, "decode")
    assert status == 503
    assert reason in str(document["message"])


def test_unknown_metric_or_service_is_404():
    figures = figures_of(load())
    assert figures.answer("models", "other", "prefill")[0] == 404
    assert figures.answer(*NAME, "both")[0] == 404
    figures.forget(NAME)
    assert figures.answer(*NAME, "prefill")[0] == 404
    registry = CollectorRegistry()
    registry.register(figures)
    assert b"{" not in generate_latest(registry)


def targets() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """File, document and what it scales."""
    return [(name, one, one["spec"]["scaleTargetRef"]) for name in ("hpa.yaml", "keda.yaml") for one in documents(name)]


def test_autoscaler_examples_target_pools_within_bounds():
    [service] = documents("service.yaml")
    assert service["spec"]["autoscaling"] == {"mode": "external"}
    for name, one, target in targets():
        role = target["name"].rpartition("-")[2]
        assert target == {
            "apiVersion": service["apiVersion"],
            "kind": "WorkerPool",
            "name": pool_name(service["metadata"]["name"], role),
        }, name
        assert one["metadata"]["namespace"] == service["metadata"]["namespace"]
        most = one["spec"].get("maxReplicas", one["spec"].get("maxReplicaCount"))
        assert most == service["spec"][role]["scaling"]["maxReplicas"]
    assert len(targets()) == 4


def test_hpas_name_metrics_and_labels_that_are_served():
    figures = figures_of(load(running=3))
    for one in documents("hpa.yaml"):
        [metric] = one["spec"]["metrics"]
        wanted = metric["external"]["metric"]
        registry = CollectorRegistry()
        registry.register(figures)
        labels = {"service_namespace": one["metadata"]["namespace"], **wanted["selector"]["matchLabels"]}
        assert registry.get_sample_value(wanted["name"], labels) is not None


def test_metrics_that_the_keda_example_reads_are_served():
    figures = figures_of(load(running=3))
    for one in documents("keda.yaml"):
        [trigger] = one["spec"]["triggers"]
        assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "AverageValue")
        assert set(trigger["metadata"]) == {"url", "valueLocation", "targetValue"}
        assert all(isinstance(text, str) for text in trigger["metadata"].values()), "KEDA takes strings alone"
        path = trigger["metadata"]["url"].partition(":8080/scaling/")[2].split("/")
        status, document = figures.answer(*path)
        assert status == 200
        assert isinstance(document[trigger["metadata"]["valueLocation"]], float)
        assert one["spec"].keys() == {
            "scaleTargetRef",
            "pollingInterval",
            "cooldownPeriod",
            "minReplicaCount",
            "maxReplicaCount",
            "triggers",
        }


def test_adapter_finds_the_series_by_a_label_they_have():
    [values] = documents("prometheus-adapter.yaml")
    [rule] = values["rules"]["external"]
    assert "^tandem_scaling_.*" in rule["seriesQuery"]
    assert list(rule["resources"]["overrides"]) == ["service_namespace"]
    assert "by (model_service, role)" in rule["metricsQuery"]
