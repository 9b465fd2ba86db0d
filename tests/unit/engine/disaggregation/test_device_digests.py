"""The Triton kernels of digests, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.digests")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_digest_kernels(check):
    CHECKS.passes(check)
