"""Pods as the API describes them → what the operator needs of them."""

from typing import Any

import pytest

from tandem_operator.telemetry.pods import DELETION_COST, PodSeen


def pod(**changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "chat-decode-1f-x",
            "uid": "u1",
            "labels": {
                "app.kubernetes.io/component": "worker",
                "tandem.dev/role": "decode",
                "tandem.dev/revision": "1f",
            },
            "annotations": {DELETION_COST: "7"},
            **changes.get("metadata", {}),
        },
        "spec": {
            "containers": [
                {"ports": [{"name": "health", "containerPort": 9090}, {"containerPort": 1}]},
                {"name": "sidecar"},
            ]
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{"type": "Ready", "status": "True"}],
            **changes.get("status", {}),
        },
    }


def test_worker_pod_is_read_with_role_ports_and_revision() -> None:
    assert PodSeen.of(pod()) == PodSeen(
        name="chat-decode-1f-x",
        uid="u1",
        ip="10.0.0.7",
        role="decode",
        revision="1f",
        ready=True,
        ports={"health": 9090},
        deletion_cost=7,
    )


def test_pod_that_is_not_scheduled_yet() -> None:
    raw = pod()
    raw["status"] = {"phase": "Pending"}
    seen = PodSeen.of(raw)
    assert seen is not None
    assert not seen.ready
    assert seen.ip == ""
    assert seen.url("health", "/metrics") is None


def test_pod_with_a_deletion_timestamp_is_terminating() -> None:
    seen = PodSeen.of(pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))
    assert seen is not None
    assert seen.terminating


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pods_that_have_ended_are_none(phase: str) -> None:
    assert PodSeen.of(pod(status={"phase": phase})) is None


@pytest.mark.parametrize("component", ["redis", "operator", ""])
def test_pods_of_other_components_are_not_workers(component: str) -> None:
    assert PodSeen.of(pod(metadata={"labels": {"app.kubernetes.io/component": component}})) is None


def test_foreign_deletion_cost_is_ignored() -> None:
    seen = PodSeen.of(pod(metadata={"annotations": {DELETION_COST: "cheap"}}))
    assert seen is not None
    assert seen.deletion_cost == 0


def test_pod_urls_have_declared_ports_and_ipv6_brackets() -> None:
    seen = PodSeen.of(pod())
    assert seen is not None
    assert seen.url("health", "/metrics") == "http://10.0.0.7:9090/metrics"
    assert seen.url("admin", "/metrics") is None
    six = PodSeen.of(pod(status={"podIP": "fd00::7"}))
    assert six is not None
    assert six.url("health", "/role") == "http://[fd00::7]:9090/role"
