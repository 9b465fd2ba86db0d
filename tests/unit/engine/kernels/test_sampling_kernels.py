"""The Triton kernels of edits, noise and sampling, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.sampling_kernels")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_sampling_kernels(check):
    CHECKS.passes(check)
