"""The Triton kernels of norms, rotations, stores and activations, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.layer_kernels")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_layer_kernels(check):
    CHECKS.passes(check)
