"""The kernel of `kernels.triton.delta_runs`, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.delta_runs")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_delta_runs_kernels(check):
    CHECKS.passes(check)
