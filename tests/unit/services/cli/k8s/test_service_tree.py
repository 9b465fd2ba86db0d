"""A ModelService as a tree: from the API server's objects and what pods say, to text and JSON."""

from datetime import datetime

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tandem_engine.config import Role
from tandem_services.cli.k8s.pods import Pod, WorkerFigures, gateway_figures, worker_figures
from tandem_services.cli.k8s.views import decisions_text, queue_text, roles_text, service_tree, tree_text
from tandem_services.cli.text.tables import age, seconds
from tandem_services.common.metrics import MetricFamilies
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.queueing.admission import QueueMetrics
from tandem_services.worker.metrics import ServiceNumbers, WorkerCollector
from tandem_testing.kubernetes_objects import (
    condition,
    deployment_pods,
    follower,
    model_service,
    pod,
    service_status,
    worker_pool,
)
from tandem_testing.mock_engine_process import idle_stats

NOW = datetime.fromisoformat("2026-01-01T12:30:00Z")
POOLS = [worker_pool("prefill", 1, ready=1), worker_pool("decode", 2, ready=1)]


EXPECTED = """\
MODELSERVICE                   STATE          SERVES  RUNNING  QUEUE             KV    AGE  NOTE
llama                          Progressing  http://llama-gateway.models:8000
├─ ✓ PrefillWorkersReady       AllReady: 1 of 1 prefill workers are ready
├─ ✓ DecodeWorkersReady        SomeReady: 1 of 2 decode workers are ready
├─ prefill                     1/1 ready
│  └─ revision 5d8f            100 % of new requests
│     └─ llama-prefill-5d8f-a  Ready          decode  2        0                 0 %   2h   flipped from prefill
├─ decode                      1/2 ready
│  └─ revision 5d8f            100 % of new requests
│     ├─ llama-decode-5d8f-a   Ready          decode  3        1 (2,048 tokens)  41 %  2h
│     └─ llama-decode-5d8f-b   Unschedulable                                           2h   0/3 nodes are available
├─ gateway                     1/1 ready
│  └─ llama-gateway-7c         Ready                  4        3                       2h
└─ llama-redis-0               Ready                                                   2h"""


def exposition(role: Role = Role.DECODE, draining_s: float | None = None, offered: bool = True, **stats) -> str:
    """What a worker answers to `GET /metrics`."""
    numbers = ServiceNumbers(
        registered=True, offered=offered, index_replays=0, redis_failures=0, role=role, draining_s=draining_s
    )
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: idle_stats(**stats), lambda: numbers))
    return generate_latest(registry).decode()


def gateway_exposition() -> str:
    registry = CollectorRegistry()
    families = MetricFamilies(registry)
    GatewayMetrics(families, model="m").running.value = 4
    QueueMetrics(families, model="m").waiting({"tenant": 3})
    return generate_latest(registry).decode()


def figures() -> dict:
    return {
        "llama-prefill-5d8f-a": worker_figures(exposition(Role.DECODE, running=2, total_pages=9, free_pages=9)),
        "llama-decode-5d8f-a": worker_figures(
            exposition(
                running=3,
                waiting=1,
                waiting_tokens=2048,
                oldest_wait_s=1.5,
                total_pages=100,
                free_pages=50,
                evictable_pages=9,
            )
        ),
        "llama-gateway-7c": gateway_figures(gateway_exposition()),
    }


def text(service=None, *, pools=POOLS, pods=None, answers=None, **options) -> str:
    tree = service_tree(
        service or model_service(),
        pools,
        deployment_pods() if pods is None else pods,
        figures() if answers is None else answers,
    )
    return tree_text([tree], now=NOW, **options)


def test_figures_are_read_from_exported_metrics():
    worker = figures()["llama-decode-5d8f-a"]
    assert (worker.serves, worker.running, worker.waiting, worker.waiting_tokens) == ("decode", 3, 1, 2048)
    assert worker.kv_usage == pytest.approx(0.41)
    assert worker_figures(exposition(draining_s=1.0)).draining
    gateway = figures()["llama-gateway-7c"]
    assert (gateway.running, gateway.waiting) == (4, 3)
    with pytest.raises(ValueError, match="."):
        worker_figures("this is no exposition {")


def test_service_tree_shows_conditions_roles_revisions_pods():
    assert text() == EXPECTED


@pytest.mark.parametrize(
    ("kind", "status", "mark"),
    [
        ("RouterReady", "True", "✓"),
        ("RouterReady", "False", "✗"),
        ("RouterReady", "Unknown", "?"),
        ("Degraded", "False", "✓"),
        ("Degraded", "True", "✗"),
        ("Progressing", "True", "•"),
        ("AutoscalingActive", "False", "•"),
    ],
)
def test_mark_shows_whether_condition_is_expected(kind, status, mark):
    shown = text(model_service(status=service_status(conditions=[condition(kind, status, "Reason")])))
    assert f"├─ {mark} {kind} " in shown


def test_wide_adds_nodes_and_restarts():
    lines = text(wide=True).splitlines()
    assert lines[0].split()[-4:] == ["AGE", "NODE", "RESTARTS", "NOTE"]
    assert next(line for line in lines if "decode-5d8f-a" in line).split()[-2:] == ["node-0", "0"]


def test_two_revisions_are_apart_and_shares_are_theirs():
    old, new = deployment_pods()[1], deployment_pods()[0]
    old["metadata"]["labels"]["tandem.dev/revision"] = "0ld"
    revisions = [
        {"name": "5d8f", "share": 0.25, "prefill": {"desired": 1}, "decode": {}},
        {"name": "0ld", "share": 0.75, "prefill": {}, "decode": {"desired": 1}},
    ]
    shown = text(model_service(status=service_status(revisions=revisions)), pods=[old, new])
    assert "revision 5d8f" in shown
    assert [line.split()[-5] for line in shown.splitlines() if "revision 0ld" in line] == ["75", "75"]


def test_pods_of_one_worker_are_below_it():
    first, second = pod("llama-decode-5d8f-0", role="decode"), follower("llama-decode-5d8f-0-1", ready=False)
    left = follower("llama-decode-5d8f-7-1", leader="llama-decode-5d8f-7")
    lines = text(pods=[second, first, left]).splitlines()
    at = next(number for number, line in enumerate(lines) if "llama-decode-5d8f-0 " in line)
    assert lines[at].startswith("│     └─ llama-decode-5d8f-0 ")
    assert lines[at + 1].startswith("│        └─ llama-decode-5d8f-0-1  Starting ")
    assert lines[-1].startswith("└─ llama-decode-5d8f-7-1"), "its leader is not there, and it is shown"
    shown = service_tree(model_service(), POOLS, [first, second], figures())
    assert [role.ready for role in shown.roles] == [1, 1], "workers are counted, not pods"
    assert roles_text([shown]).count("llama-decode") == 1


def test_unobserved_generation_is_shown():
    stale = service_status(observedGeneration=2)
    for one in stale["conditions"]:
        one["observedGeneration"] = 2
    shown = text(model_service(status=stale))
    assert "the operator has not seen the latest change yet" in shown
    assert "AllReady: 1 of 1 prefill workers are ready (of an older spec)" in shown


def test_service_that_no_operator_has_touched_is_shown():
    shown = text(model_service(status={}), pools=[], pods=[], answers={})
    assert "Unknown" in shown
    assert "0/2 ready" in shown


def test_silent_or_unlisted_pod_is_marked():
    answers = {
        "llama-decode-5d8f-a": "timed out",
        "llama-prefill-5d8f-a": worker_figures(exposition(Role.PREFILL, offered=False)),
    }
    shown = text(answers=answers)
    assert "no response: timed out" in shown
    assert "not offered to requests" in shown


@pytest.mark.parametrize(
    ("changes", "state", "failure"),
    [
        ({}, "Ready", ""),
        ({"conditions": []}, "Starting", ""),
        ({"conditions": [], "phase": "Failed"}, "Failed", ""),
        (
            {
                "conditions": [],
                "containerStatuses": [
                    {
                        "name": "worker",
                        "restartCount": 4,
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                        "lastState": {"terminated": {"exitCode": 3, "message": "tandem: error: no config.json in /m"}},
                    }
                ],
            },
            "CrashLoopBackOff",
            "worker: ended with status 3: tandem: error: no config.json in /m",
        ),
        (
            {
                "conditions": [],
                "phase": "Pending",
                "initContainerStatuses": [
                    {"name": "download", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
                ],
            },
            "ErrImagePull",
            "download: ErrImagePull: not found",
        ),
        (
            {
                "conditions": [],
                "containerStatuses": [
                    {"name": "worker", "state": {"waiting": {"reason": "PreStartHookError", "message": "why not"}}}
                ],
            },
            "PreStartHookError",
            "why not",
        ),
        (
            {
                "conditions": [],
                "phase": "Pending",
                "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}],
            },
            "Pending",
            "",
        ),
    ],
)
def test_pod_state_is_one_word_with_reason(changes, state, failure):
    seen = Pod.of(pod("w", role="decode", **changes))
    assert (seen.state, seen.failure, seen.ready) == (state, failure, state == "Ready")


def test_deleted_pod_is_leaving_in_any_state():
    leaving = pod("w", role="decode")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert Pod.of(leaving).state == "Terminating"


def tree(answers=None):
    return service_tree(model_service(), POOLS, deployment_pods(), figures() if answers is None else answers)


def test_roles_text_shows_spec_role_and_serving_role():
    rows = [line.split() for line in roles_text([tree()]).splitlines()]
    assert rows[1][:5] == ["llama-prefill-5d8f-a", "llama", "prefill", "decode", "Ready"]
    assert rows[3][:5] == ["llama-decode-5d8f-b", "llama", "decode", "-", "Unschedulable"]
    assert roles_text([]) == ""


def test_queue_text_lists_queues_and_names_silent_pods():
    shown = queue_text([tree()])
    rows = [line.split() for line in shown.splitlines()]
    assert rows[1] == ["llama-gateway-7c", "llama", "gateway", "4", "3", "0", "0", "s"]
    assert rows[3] == ["llama-decode-5d8f-a", "llama", "decode", "3", "1", "2,048", "1.5", "s"]
    silent = queue_text([tree({"llama-decode-5d8f-a": "timed out"})])
    assert silent.splitlines()[-1].startswith("not counted, because they say nothing: llama-gateway-7c, ")


def test_decisions_are_listed_with_their_reasons():
    decisions = [
        {
            "time": "2026-01-01T10:00:05Z",
            "role": "decode",
            "action": "scale",
            "before": 1,
            "after": 2,
            "reason": "queue of 4.2 s",
        },
        {
            "time": "2026-01-01T10:00:00Z",
            "role": "both",
            "action": "hold",
            "before": 2,
            "after": 2,
            "reason": "as wanted",
        },
    ]
    reported = model_service(status=service_status(decisions=decisions))
    rows = decisions_text([reported]).splitlines()
    assert rows[1].split(maxsplit=6) == ["2026-01-01T10:00:05Z", "decode", "scale", "1", "→", "2", "queue of 4.2 s"]
    assert rows[2].split()[:4] == ["2026-01-01T10:00:00Z", "both", "hold", "2"]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, "spec.autoscaling.mode is none"),
        ({"autoscaling": {"mode": "internal"}}, "nothing was decided yet"),
        ({"autoscaling": {"mode": "external"}}, "spec.autoscaling.mode is external"),
    ],
)
def test_reason_for_missing_decisions_is_shown(spec, why):
    assert decisions_text([model_service(**spec)]) == f"no decisions: {why}"


def test_durations_are_shown_in_one_unit():
    shown = [seconds(value) for value in (None, 0.0, 0.0001, 0.0123, 1.26, 42.4)]
    assert shown == ["-", "0 s", "100 µs", "12 ms", "1.3 s", "42 s"]
    assert [age(value) for value in (5, 130, 7300, 200_000)] == ["5s", "2m", "2h", "2d"]
    assert isinstance(figures()["llama-decode-5d8f-a"], WorkerFigures)
