"""Families beyond the plain decoder by the queued steps and graphs of a device, as tests of a GPU run them.

The device is a CPU that checks no rule: experts and attention of torch wait for values, where a device has kernels.
"""

import pytest
import torch

from tandem_engine.executor.platform import OnStreams
from tandem_testing.device_families import DEVICE_FAMILIES, differences_of
from tandem_testing.exactness import DISAGGREGATED
from tandem_testing.plain_device import AgainCapturer, PlainDevice, PlainStreams
from tandem_testing.simulated_platform import load_simulated
from tandem_testing.turning_reference import TurningReference


class WithoutKernels(PlainDevice):
    """Attention by torch."""

    def __init__(self) -> None:
        OnStreams.__init__(
            self,
            streams=PlainStreams(),
            capturer=AgainCapturer(),
            attention=lambda pool, _heads, specs, _dtype: TurningReference(pool, specs=specs),
        )


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE_FAMILIES)
def test_queued_paths_of_a_family_equal_transformers(name, tmp_path):
    paths = DEVICE_FAMILIES[name].paths[-1:]
    model = load_simulated(DEVICE_FAMILIES[name].write(tmp_path))
    assert differences_of(model, paths, platform=WithoutKernels) == dict.fromkeys(paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v3"])
def test_family_of_a_device_is_handed_over(name, tmp_path):
    """States and latents go by NIXL, from and to memory that a device would have."""
    model = load_simulated(DEVICE_FAMILIES[name].write(tmp_path))
    assert differences_of(model, [DISAGGREGATED], platform=WithoutKernels) == {DISAGGREGATED: None}
