"""`VersionSkew`: releases of pods and of the operator that are too far apart, while images of two releases roll."""

from dataclasses import replace

import pytest

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_operator.planning.observed import Canary, DeploymentSeen, GatewaySeen, Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.status import version_skew
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.samples import PodSampler
from tandem_testing.kube_cluster import KubeCluster, service_of
from tandem_testing.pod_builders import gateway, pod, worker

FAR = RELEASE + WINDOW + 1


def observed(**releases: int) -> Observed:
    return Observed(now="2026-01-01T00:00:00Z", releases={name.replace("_", "-"): of for name, of in releases.items()})


@pytest.mark.parametrize("releases", [{}, {"a": RELEASE}, {"a": RELEASE + WINDOW, "b": RELEASE}, {"a": RELEASE - 1}])
def test_releases_within_the_window_are_no_skew(releases):
    one = version_skew(observed(**releases))
    assert (one.status, one.reason) == ("False", "WithinWindow")


def test_skew_names_pods_releases_and_the_fix():
    one = version_skew(observed(chat_decode_1=RELEASE, chat_decode_2=FAR, chat_gateway=RELEASE))
    assert (one.status, one.reason) == ("True", "OutsideWindow")
    assert f"chat-decode-2 ({FAR})" in one.message
    assert f"operator ({RELEASE})" in one.message
    assert "operator first, then workers, then gateways (spec.images)" in one.message


def test_version_skew_names_pods_unlike_operator_release():
    one = version_skew(observed(chat_decode=FAR, chat_gateway=FAR))
    assert one.status == "True"
    assert f"pods chat-decode ({FAR}), chat-gateway ({FAR}), operator ({RELEASE})" in one.message


def test_pods_two_windows_apart_are_skewed_among_themselves():
    one = version_skew(observed(new=RELEASE + WINDOW, old=RELEASE - 1))
    assert (one.status, f"new ({RELEASE + WINDOW})" in one.message) == ("True", True)
    assert f"old ({RELEASE - 1})" in one.message


def test_version_skew_message_of_many_pods_is_short():
    one = version_skew(observed(**{f"pod_{number:03}": FAR for number in range(500)}))
    assert "and 492 more" in one.message
    assert "pod-000" in one.message
    assert "pod-499" in one.message
    assert len(one.message) < 700


def test_rollout_of_too_new_image_is_skewed_until_reverted():
    cluster, images = KubeCluster(), {"engine": "tandem-engine:1"}
    cluster.settle(service_of(images=images))
    old = cluster.status.revision
    changed = service_of(images={"engine": "tandem-engine:9"})
    cluster.reconcile(changed)
    new = cluster.status.revision
    assert new != old

    def status_of(service, **releases):
        seen = replace(cluster.observed(), releases=releases)
        return make_plan(service, seen, cluster.status, 1, OperatorSettings()).status

    both = {f"chat-decode-{old}-x": RELEASE, f"chat-decode-{new}-y": FAR, "chat-gateway-z": RELEASE}
    status = status_of(changed, **both)
    skew = next(one for one in status.conditions if one.type == "VersionSkew")
    assert skew.status == "True"
    assert f"chat-decode-{new}-y ({FAR})" in skew.message
    assert f"chat-decode-{old}-x ({RELEASE})" in skew.message
    assert status.error.startswith("OutsideWindow: ")
    status = status_of(service_of(images=images), **{f"chat-decode-{old}-x": RELEASE, "chat-gateway-z": RELEASE})
    assert next(one for one in status.conditions if one.type == "VersionSkew").status == "False"
    assert status.error == ""


CLAIM = {"claim": {"claimName": "models", "path": "chat"}}
UNSERVED = Canary(passed=False, unserved=True, message="the model is not served here")
OLD_GATEWAY = "gateway: ended with status 2: tandem: error: --model fleet: no such folder"
"""With `--model fleet`, of the release before tokenizers came from workers."""


def conditions_of(service, **seen):
    status = make_plan(service, replace(observed(), **seen), KubeCluster().status, 1, OperatorSettings()).status
    return {one.type: one for one in status.conditions}, status


def test_pinned_gateway_image_without_tokenizers_names_the_fix():
    service = service_of(model=CLAIM, images={"services": "registry/services:0.0.9"})
    failing = DeploymentSeen(name="chat-gateway", replicas=2, pods=1, failure=OLD_GATEWAY)
    conditions, status = conditions_of(service, deployments=(failing,))
    for kind in ("RouterReady", "Degraded"):
        assert "set spec.gateway.tokenizer to model" in conditions[kind].message
    assert (conditions["RouterReady"].status, conditions["Degraded"].status) == ("False", "True")
    assert status.error.startswith("PodsFailing: chat-gateway")
    # Another failure is reported as it is.
    conditions, _ = conditions_of(service, deployments=(replace(failing, failure="gateway: ErrImagePull"),))
    assert "tokenizer" not in conditions["RouterReady"].message


@pytest.mark.parametrize(
    ("release", "tokenizer", "canary", "reason"),
    [
        (0, None, None, "TokenizerUnavailable"),
        (0, None, UNSERVED, "TokenizerUnavailable"),
        (0, None, Canary(passed=False, message="the prefill worker does not answer"), "CanaryFailed"),
        (0, None, Canary(passed=True), "CanaryPassed"),
        (0, "model", UNSERVED, "CanaryFailed"),
        (RELEASE, None, UNSERVED, "CanaryFailed"),
    ],
)
def test_shared_gateways_of_an_earlier_release_name_the_fix(release, tokenizer, canary, reason):
    """Where they do not serve the model: a canary that fails at a worker has another cause."""
    chosen = {} if tokenizer is None else {"gateway": {"tokenizer": tokenizer}}
    service = service_of(model=CLAIM, gatewayRef={"name": "front"}, **chosen)
    deployment = DeploymentSeen(name="front-gateway", replicas=1, ready=1, pods=1)
    conditions, _ = conditions_of(
        service,
        gateway=GatewaySeen(deployment=deployment),
        canaries={} if canary is None else {"": canary},
        releases={"front-gateway-x": release, "chat-decode-y": RELEASE},
    )
    assert conditions["RouterReady"].reason == reason


def test_gateways_of_a_model_gateway_count_for_version_skew():
    """They are polled with the service (`polled_pods`), under the names of their pods."""
    pods = (pod("chat-prefill-a", "prefill"), pod("chat-decode-b"), pod("front-gateway-c", "gateway", revision=""))
    figures = (worker("prefill", release=RELEASE), worker(release=RELEASE), replace(gateway(), release=FAR))
    reading = PodSampler().take(100.0, pods, {one.uid: each for one, each in zip(pods, figures, strict=True)})
    service = service_of(model=CLAIM, gatewayRef={"name": "front"})
    conditions, status = conditions_of(service, releases=reading.releases)
    assert conditions["VersionSkew"].status == "True"
    assert f"front-gateway-c ({FAR})" in conditions["VersionSkew"].message
    assert status.error.startswith("OutsideWindow: ")
