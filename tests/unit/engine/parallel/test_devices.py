"""Which device a rank has, and what is said when it is not there."""

import pytest
import torch

from tandem_engine.errors import ConfigError
from tandem_engine.parallel.devices import device_of_rank, require_device


@pytest.mark.parametrize(
    ("device", "rank", "own"),
    [("cpu", 3, "cpu"), ("cuda", 0, "cuda:0"), ("cuda", 2, "cuda:2"), ("cuda:4", 1, "cuda:5")],
)
def test_each_rank_has_a_gpu_of_its_own(device, rank, own):
    assert device_of_rank(device, rank) == own
    assert device_of_rank(own, -rank) == device_of_rank(device, 0)


def test_a_cpu_is_always_there():
    require_device("cpu", ranks=8)


def test_a_build_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"--device cuda:1 needs a build of torch with CUDA.*--device cpu"):
        require_device("cuda:1")


def test_no_gpu_is_said(monkeypatch):
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
