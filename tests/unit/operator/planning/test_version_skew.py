"""`VersionSkew`: releases of pods and of the operator that are too far apart, while images of two releases roll."""

from dataclasses import replace

import pytest

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.status import version_skew
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_cluster import KubeCluster, service_of

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


def test_message_has_an_end():
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
