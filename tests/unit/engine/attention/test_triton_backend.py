"""The backend of Triton kernels, interpreted."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.triton_backend")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_triton_backend(check):
    CHECKS.passes(check)
