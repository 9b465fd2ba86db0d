"""Engines of a device launch nothing new once they are ready: as the compiler of a GPU would see their launches."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.warm_engine")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_warm_engine(check):
    CHECKS.passes(check)
