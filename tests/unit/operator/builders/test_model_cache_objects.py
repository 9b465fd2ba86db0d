"""Objects of a ModelCache, and pods of services that use one."""

import msgspec
import pytest

from tandem_operator.api.model_cache import ModelCacheSpec
from tandem_operator.api.model_service import ModelServiceSpec
from tandem_operator.api.sources import ClaimSource
from tandem_operator.builders.gateway import gateway_deployment
from tandem_operator.builders.model_cache import (
    KEEP,
    SPEC,
    download_job,
    download_policy,
    folder_of,
    halted,
    new_claim,
    prune_job,
    request_of,
)
from tandem_operator.builders.served import served
from tandem_operator.builders.worker import workers
from tandem_operator.planning.plan import revision_of
from tandem_operator.settings import OperatorSettings
from tandem_services.cli.main import build_parser
from tandem_testing.pod_security import violations

SETTINGS = OperatorSettings()
COMMIT, OTHER = "a" * 40, "b" * 40
SOURCE = {"huggingFace": {"id": "org/mini", "tokenSecret": {"name": "hub", "key": "token"}}}
NEW = {"newClaim": {"size": "10Gi", "storageClassName": "fast"}}


def spec(storage=None, **fields):
    body = {"source": SOURCE, "storage": storage or NEW, **fields}
    return msgspec.convert(body, ModelCacheSpec)


def container(job):
    (one,) = job["spec"]["template"]["spec"]["containers"]
    return one


def job(**fields):
    return download_job("qwen", "models", spec(**fields), SETTINGS)


def test_job_downloads_with_the_arguments_that_the_command_takes():
    one = container(job())
    args = build_parser().parse_args([*one["command"][1:], *one["args"]])
    assert (args.model, args.into, args.max_bytes) == ("org/mini@main", "/cache/tandem-cache/qwen", 10 << 30)
    assert (args.progress_port, args.result) == (8080, "/dev/termination-log")
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in one["env"]


@pytest.mark.parametrize("one", [job(), prune_job("qwen", "models", spec(), SETTINGS, COMMIT, [OTHER])])
def test_job_has_the_rights_of_restricted_and_no_account(one):
    pod = one["spec"]["template"]["spec"]
    assert violations(one["spec"]["template"]) == []
    assert pod["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"
    assert container(one)["resources"]["limits"]["memory"] == "2Gi"


def test_job_gives_its_group_to_all_folders_of_the_volume():
    """Also below a root whose group is right: kubelets make mounted folders again, as root."""
    security = job()["spec"]["template"]["spec"]["securityContext"]
    assert (security["fsGroup"], security["fsGroupChangePolicy"]) == (10001, "Always")


def test_job_is_bounded_in_attempts_and_time():
    body = job(download={"retries": 2, "timeoutSeconds": 600})["spec"]
    assert (body["backoffLimit"], body["activeDeadlineSeconds"]) == (2, 600)
    assert halted({"spec": body})["spec"] == {**body, "parallelism": 0}


def test_job_of_another_manifest_has_another_hash():
    def digest(one):
        return one["metadata"]["annotations"][SPEC]

    assert digest(job()) == digest(job())
    assert digest(job()) != digest(job(download={"retries": 1}))
    first, second = (spec(source={"huggingFace": {"id": "org/mini", "revision": one}}) for one in ("v1", "v2"))
    assert request_of(first.source.hugging_face) != request_of(second.source.hugging_face)


def test_prune_job_names_the_commits_that_it_keeps():
    one = prune_job("qwen", "models", spec(), SETTINGS, COMMIT, [OTHER])
    args = build_parser().parse_args([*container(one)["command"][1:], *container(one)["args"]])
    assert (args.model, args.prune, args.keep) == (f"org/mini@{COMMIT}", True, [OTHER])
    assert one["metadata"]["annotations"][KEEP] == f"{COMMIT},{OTHER}"


def test_placement_of_the_job_is_that_of_the_spec():
    download = {"nodeSelector": {"pool": "io"}, "tolerations": [{"key": "io", "operator": "Exists"}]}
    pod = job(download={**download, "image": "me/tandem:1", "pullSecrets": ["regcred"]})["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "io"}
    assert pod["tolerations"] == [{"key": "io", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "regcred"}]
    assert pod["containers"][0]["image"] == "me/tandem:1"


def test_existing_claim_is_used_below_its_path():
    existing = spec({"claim": {"claimName": "weights", "path": "ai"}})
    assert new_claim("qwen", "models", existing) == []
    assert folder_of("qwen", existing) == "ai/tandem-cache/qwen"
    volumes = download_job("qwen", "models", existing, SETTINGS)["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "weights"}


def test_new_claim_has_the_size_and_class_of_the_spec():
    (claim,) = new_claim("qwen", "models", spec())
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }


def test_policy_opens_the_progress_to_the_operator_alone():
    mirror = {"huggingFace": {"id": "org/mini", "endpoint": "http://mirror.example:8081"}}
    (policy,) = download_policy("qwen", "models", spec(source=mirror), SETTINGS)
    (ingress,) = policy["spec"]["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": 8080}]
    assert [one["namespaceSelector"]["matchLabels"] for one in ingress["from"]] == [
        {"kubernetes.io/metadata.name": "tandem-system"}
    ]
    assert [port["port"] for port in policy["spec"]["egress"][1]["ports"]] == [443, 8081]
    assert download_policy("qwen", "models", spec(download={"networkPolicy": False}), SETTINGS) == []


def cached_service(commit=COMMIT):
    gateway = {"tokenizer": "model"}
    given = msgspec.convert({"model": {"cacheRef": {"name": "qwen"}}, "gateway": gateway}, ModelServiceSpec)
    claim = ClaimSource(claim_name="qwen", path=f"tandem-cache/qwen/{commit}")
    return served("chat", "models", given, SETTINGS, cache=claim)


@pytest.mark.parametrize("part", ["worker", "gateway"])
def test_pods_mount_the_commit_read_only_and_download_nothing(part):
    service = cached_service()
    built = gateway_deployment(service) if part == "gateway" else workers(service, "decode", "r1", 1)
    pod = built["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "qwen", "readOnly": True}} in pod["volumes"]
    mounts = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "model"]
    assert mounts == [
        {"name": "model", "mountPath": "/models", "subPath": f"tandem-cache/qwen/{COMMIT}", "readOnly": True}
    ]


def test_another_commit_is_another_revision():
    assert revision_of(cached_service()) == revision_of(cached_service())
    assert revision_of(cached_service()) != revision_of(cached_service(OTHER))
