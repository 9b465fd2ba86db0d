"""GPUs of a role end to end: the flag, the image, the revision, and what is refused before a pod is made."""

from typing import Any

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.engine_flags import gpus_of
from tandem_operator.builders.served import Served
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan, revision_of
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_services.cli.main import build_parser
from tandem_testing.kube_cluster import service_of

SETTINGS = OperatorSettings()
ONE = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
SHARE = {"resources": {"limits": {"nvidia.com/gpu.shared": "1"}}}
CPU: dict[str, Any] = {}
SIZES = ("--mem-fraction-static", "--kv-cache-gib")


def worker(service: Served, role: str) -> dict[str, Any]:
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, SETTINGS)
    name = f"chat-{role}-{revision_of(service)}"
    (deployment,) = [one for one in plan.apply if one["metadata"]["name"] == name and one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def device_flag(container: dict[str, Any]) -> str:
    device: str = build_parser().parse_args([*container["command"][1:], *container["args"]]).device
    return device


@pytest.mark.parametrize(
    ("engine", "role", "device"),
    [
        ({}, CPU, "cpu"),
        ({}, ONE, "cuda"),
        ({"device": "auto"}, ONE, "cuda"),
        ({"device": "cuda"}, ONE, "cuda"),
        ({"device": "cpu"}, ONE, "cpu"),
        ({}, {"resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}}, "cuda"),
        ({"device": "cuda", "memFractionStatic": 0.4}, SHARE, "cuda"),
        ({}, {"resources": {"limits": {"nvidia.com/gpu": 0}}}, "cpu"),
    ],
    ids=str,
)
def test_workers_run_on_the_gpus_that_their_role_has(engine, role, device):
    service = service_of(engine=engine, prefill=role, decode=role)
    assert problems_of(service, ClusterApis()) == []
    image = {"cpu": SETTINGS.engine_image, "cuda": SETTINGS.cuda_engine_image}[device]
    for name in ("prefill", "decode"):
        container = worker(service, name)
        assert device_flag(container) == device
        assert container["image"] == image
        assert not [one for one in container["env"] if one["name"].startswith("NVIDIA_")], "the device plugin's"


def test_image_that_is_named_is_that_of_every_device():
    service = service_of(images={"engine": "mine:1"}, prefill=ONE, decode=ONE)
    assert worker(service, "decode")["image"] == "mine:1"


def test_device_changes_the_revision_and_cpu_revision_stays():
    named = {"images": {"engine": "mine:1"}, "engine": {"dtype": "float32"}}
    cpu, gpu = service_of(**named), service_of(**named, prefill=ONE, decode=ONE)
    one_of_each = service_of(**named, prefill=ONE)
    assert len({revision_of(cpu), revision_of(gpu), revision_of(one_of_each)}) == 3
    assert revision_of(cpu) == "4753beba"


def test_kv_of_another_dtype_is_another_revision():
    """One worker's pages mean nothing to the other: they are exchanged side by side, never paired."""
    plain, fp8 = ({"engine": {"dtype": "float32"} | more} for more in ({}, {"kvCacheDtype": "fp8"}))
    assert revision_of(service_of(**plain)) != revision_of(service_of(**fp8))
    assert "--kv-cache-dtype fp8" in " ".join(worker(service_of(**fp8), "decode")["args"])
    assert "--kv-cache-dtype" not in worker(service_of(**plain), "decode")["args"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"engine": {"device": "cuda"}, "decode": ONE},
            "spec.prefill: engine.device is cuda and resources.limits names no NVIDIA GPU; "
            'add nvidia.com/gpu: "1" to spec.prefill.resources.limits',
        ),
        (
            {"engine": {"dtype": "float32"}, "decode": {"resources": {"limits": {"amd.com/gpu": 1}}}},
            "spec.decode.resources.limits: engines run on NVIDIA GPUs or CPUs, not on amd.com/gpu",
        ),
        ({"prefill": SHARE, "decode": SHARE}, "say what this worker may have of it in engine.memFractionStatic"),
        ({"prefill": ONE}, "spec.engine.dtype: auto is another type on a GPU than on a CPU (prefill on cuda and"),
    ],
    ids=["no GPU", "another maker's", "a share", "two devices"],
)
def test_device_that_cannot_run_is_rejected_with_a_fix(spec, sentence):
    (text, *_) = problems_of(service_of(**spec), ClusterApis())
    assert sentence in text


def test_devices_of_two_kinds_are_served_with_their_type_set():
    assert problems_of(service_of(engine={"dtype": "bfloat16"}, prefill=ONE), ClusterApis()) == []


def test_each_kind_of_gpu_counts_for_the_budget():
    role = service_of(prefill={"resources": {"limits": {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 1}}}).role(
        "prefill"
    )
    assert gpus_of(role.resources) == 3


def test_role_overrides_the_size_of_the_kv_pool():
    """The engine refuses two sizes: pods of a role with one, beside a share for both, never started."""
    service = service_of(engine={"memFractionStatic": 0.5}, decode={"engine": {"kvCacheGib": 4}})
    sizes = {role: [word for word in worker(service, role)["args"] if word in SIZES] for role in ("prefill", "decode")}
    assert sizes == {"prefill": ["--mem-fraction-static"], "decode": ["--kv-cache-gib"]}
