"""The kernels of `kernels.triton.latent_attention`, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.latent_attention")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_latent_attention_kernels(check):
    CHECKS.passes(check)
