"""The Triton kernels of gpt-oss's experts, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.gpt_oss_kernels")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_gpt_oss_kernels(check):
    CHECKS.passes(check)
