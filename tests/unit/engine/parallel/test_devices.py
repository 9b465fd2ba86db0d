"""Which device a rank has, and the error when it is missing."""

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AttentionLibrary, EngineConfig, GraphConfig, SchedulerConfig
from tandem_engine.executor import platform
from tandem_engine.executor.platform import OnStreams, gpu_attention, platform_for, platform_of
from tandem_engine.model.attention.prompt_choice import PromptChooser
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_engine.parallel.group import device_of_rank, require_device, use_device
from tandem_testing.forward_builders import make_pool
from tandem_testing.random_weights import small_config


@pytest.mark.parametrize(
    ("device", "rank", "own"),
    [("cpu", 3, "cpu"), ("cuda", 0, "cuda:0"), ("cuda", 2, "cuda:2"), ("cuda:4", 1, "cuda:5")],
)
def test_each_rank_has_a_gpu_of_its_own(device, rank, own):
    assert device_of_rank(device, rank) == own
    assert device_of_rank(own, -rank) == device_of_rank(device, 0)


def test_cpu_is_always_there():
    require_device("cpu", ranks=8)


def test_build_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"--device cuda:1 needs a build of torch with CUDA.*--device cpu"):
        require_device("cuda:1")


def test_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda: this process sees no GPU"):
        require_device("cuda")


@pytest.mark.parametrize(
    ("device", "ranks", "message"),
    [
        ("cuda:2", 1, "--device cuda:2 needs GPU 2, and this process sees 2"),
        ("cuda:1", 2, "--device cuda:1 with 2 ranks on this machine needs GPU 2"),
    ],
)
def test_too_few_gpus_are_counted(monkeypatch, device, ranks, message):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        require_device(device, ranks=ranks)
    require_device("cuda", ranks=2)


@pytest.mark.parametrize(("device", "used"), [("cpu", []), ("cuda", [0]), ("cuda:3", [3])])
def test_thread_s_kernels_run_on_its_gpu(monkeypatch, device, used):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    use_device(device)
    assert chosen == used


def test_step_thread_launches_kernels_on_its_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(("use", index)))
    monkeypatch.setattr(platform, "CudaStreams", lambda device: calls.append(("streams", device.index)))
    monkeypatch.setattr(platform, "CudaGraphCapturer", lambda streams: None)  # noqa: ARG005
    assert isinstance(platform_for("cuda:2"), OnStreams)
    assert calls == [("use", 2), ("streams", 2)]


@pytest.mark.parametrize(("graphs", "least"), [(GraphConfig(), 2049), (GraphConfig(prompts=False), 1024)])
def test_libraries_compute_prompts_that_no_graph_has_room_for(monkeypatch, graphs, least):
    """Else the kernel of a row would depend on its company, by which it is in a graph or not."""
    made = []
    monkeypatch.setattr(platform, "platform_for", lambda *given: made.append(given))
    limits = SchedulerConfig(max_prefill_tokens=8192, chunked_prefill_size=8192)
    config = EngineConfig(
        model_path="m", device="cuda", graphs=graphs, attention=AttentionLibrary.FLASH, scheduler=limits
    )
    platform_of(config, small_config(hidden_size=2048))
    [(device, chooser)] = made
    assert (device, chooser.wanted, chooser.least_queries) == ("cuda", "flash_attn", least)


def test_library_is_refused_for_latents_that_are_too_large_for_kernels():
    """They are computed by torch, and the flag would say nothing."""
    chooser = PromptChooser(wanted="flash_attn")
    pool = make_pool()
    pool.value_width = 513
    assert isinstance(gpu_attention(pool, 4, [], torch.bfloat16, chooser=chooser), TorchReferenceBackend)
    with pytest.raises(ConfigError, match="--attention-backend flash_attn: the model stores latents; use auto"):
        chooser.require_use()
