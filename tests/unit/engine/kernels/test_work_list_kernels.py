"""The kernels of `kernels.triton.work_list`, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.work_list")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_work_list_kernels(check):
    CHECKS.passes(check)
