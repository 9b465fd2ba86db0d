"""Digest kernels on a real device."""

import pytest
import torch

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.digests")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS.on_device)
def test_digest_kernels_on_a_device(check):
    CHECKS.passes_on("cuda", check)
