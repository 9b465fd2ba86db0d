"""Cases of the benchmark of kernels, interpreted."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.benchmark_cases")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_gpu_cases(check):
    CHECKS.passes(check)
