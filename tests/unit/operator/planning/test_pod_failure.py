"""Why a pod does not start: in the words of the component that knows, and the same words at every restart."""

import json

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.controller.observations import Parts
from tandem_operator.planning.observed import Canary, Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.pod_failure import pod_failure, termination_message
from tandem_operator.planning.status import health_of
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_objects import a_deployment, a_pod

OWNER = "uid-of-the-service"
REFUSED = "the engine cannot start (config_error): no config.json in /models: is --model the folder of a checkpoint?"
LOG = "\n".join(
    [
        '"logger": "tandem_engine", "message": "a line whose beginning was cut off"}',
        json.dumps({"level": "ERROR", "message": "no config.json in /models"}),
        json.dumps({"level": "ERROR", "message": f"worker chat-decode-1@7353857864980089432 ends: {REFUSED}"}),
        json.dumps({"level": "INFO", "message": "metrics are no longer served"}),
    ]
)
CUT_OFF = r'weights.py\", line 9, in load\n    raise RuntimeError(why)\nRuntimeError: no memory"}'
"""A record with a traceback, without its beginning: the kubelet keeps 2048 bytes."""
NESTED = '{"a": ' + 2000 * "["
FAILED = {"terminated": {"exitCode": 3, "reason": "Error", "message": LOG}}


def failures(**container):
    return list(pod_failure({"containerStatuses": [{"name": "worker", **container}]}))


@pytest.mark.parametrize(
    "container",
    [
        {"state": FAILED},
        {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}, "lastState": FAILED},
        {"state": {"running": {}}, "started": False, "ready": False, "lastState": FAILED},
    ],
    ids=["terminated", "waiting", "running"],
)
def test_failing_container_reports_one_stable_reason(container):
    assert failures(**container) == [f"worker: ended with status 3: {REFUSED}"]


@pytest.mark.parametrize(
    "container",
    [
        {"state": {"running": {}}, "started": True, "ready": False, "lastState": FAILED},
        {"state": {"running": {}}, "ready": True, "lastState": FAILED},
        {"state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": FAILED},
        {"state": {"waiting": {"reason": "PodInitializing"}}},
        {"state": {"terminated": {"exitCode": 0, "message": LOG}}},
        {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 0}}},
        {},
    ],
    ids=["came up since", "ready", "being made", "init first", "drained", "drained before", "nothing known"],
)
def test_running_pod_reports_no_failure(container):
    assert failures(**container) == []


def test_pod_without_exit_message_shows_the_kubelets_reason():
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    assert failures(state=waiting) == ["worker: CrashLoopBackOff: back-off 10s restarting failed container"]


@pytest.mark.parametrize(
    "reason",
    [
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "RunContainerError",
        "CreateContainerError",
    ],
)
def test_container_creation_error_is_reported_verbatim(reason):
    waiting = {"waiting": {"reason": reason, "message": "why not"}}
    assert failures(state=waiting) == [f"worker: {reason}: why not"]
    assert failures(state=waiting, lastState=FAILED) == [f"worker: {reason}: why not"]


@pytest.mark.parametrize(
    ("ended", "error_message"),
    [
        ({"exitCode": 137, "reason": "OOMKilled"}, "OOMKilled: memory use exceeded resources.limits.memory"),
        ({"exitCode": 139, "reason": "Error"}, "ended with SIGSEGV"),
        ({"exitCode": 1}, "ended with status 1"),
        ({"exitCode": 128, "message": 'exec: "tandem": not found'}, 'ended with status 128: exec: "tandem": not found'),
    ],
)
def test_container_exit_is_reported_by_signal_or_status(ended, error_message):
    assert failures(state={"terminated": ended}) == [f"worker: {error_message}"]


@pytest.mark.parametrize(
    ("log", "error_message"),
    [
        (
            "usage: tandem gateway\ntandem: error: --port must be at most 65535\n",
            "tandem: error: --port must be at most 65535",
        ),
        ("Traceback (most recent call last):\nValueError: boom\n", "ValueError: boom"),
        ("Fetching 9 files\nRepository not found\n", "Repository not found"),
        ('{"level": "INFO", "message": "the last line"}', "the last line"),
        (
            '{"level": "ERROR", "message": "stops", "exception": "Traceback\\n  ...\\nKeyError: 1"}',
            "stops: KeyError: 1",
        ),
        ('{"level": "ERROR", "message": "stops", "exception": null}', "stops"),
        (CUT_OFF + '\n{"level": "INFO", "message": "metrics are no longer served"}', "RuntimeError: no memory"),
        ("{not json\n", "{not json"),
        pytest.param(NESTED, NESTED, id="nested too deep to be read"),
        ("\n \n", ""),
    ],
)
def test_termination_message_extracts_last_error(log, error_message):
    assert termination_message(log) == error_message


def test_failure_message_is_one_line_without_control_characters():
    """Records escape what a client has sent; `kubectl describe` writes a condition to the terminal as it is."""
    log = json.dumps({"level": "ERROR", "message": "no model 'a\x1b[2J'\nat\u2028all"})
    assert failures(state={"terminated": {"exitCode": 1, "message": log}}) == [
        "worker: ended with status 1: no model 'a [2J' at all"
    ]
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "rpc error:\n\tnot found\n"}}
    assert failures(state=waiting) == ["worker: ErrImagePull: rpc error: not found"]


def test_conditions_quote_the_engine_that_refuses_its_model():
    """What only the checkpoint can tell, such as heads that ranks do not divide [specs-refused]."""
    status = {"containerStatuses": [{"name": "worker", "state": FAILED}]}
    pod = a_pod("chat-decode-1", role="decode", ready=False, status=status)
    parts = Parts.of(OWNER, [a_deployment("chat-decode-r1", owner=OWNER, role="decode"), pod])
    observed = Observed(now="2026-01-01T00:00:00Z", deployments=parts.deployments(), canaries={"": Canary(passed=True)})
    conditions = {one.type: one for one in health_of(service_of(), observed, "r1", {"prefill": 0, "decode": 1})}
    for kind in ("DecodeWorkersReady", "Degraded"):
        assert conditions[kind].reason == "PodsFailing"
        assert REFUSED in conditions[kind].message


def test_every_container_of_ours_has_a_termination_message():
    service = service_of(model={"huggingFace": {"id": "Qwen/Qwen3-8B"}})
    seen = Observed(now="2026-01-01T00:00:00Z")
    plan = make_plan(service, seen, ModelServiceStatus(), 1, OperatorSettings())
    pods = [one["spec"]["template"]["spec"] for one in plan.apply if one["kind"] == "Deployment"]
    containers = [one for pod in pods for one in (*pod.get("initContainers", ()), *pod["containers"])]
    assert {one["name"] for one in containers} == {"worker", "gateway", "redis", "download"}
    assert {one["terminationMessagePolicy"] for one in containers} == {"FallbackToLogsOnError"}
