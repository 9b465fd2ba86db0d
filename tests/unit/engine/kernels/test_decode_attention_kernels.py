"""The kernels of `kernels.triton.decode_attention`, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.decode_attention")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_decode_attention_kernels(check):
    CHECKS.passes(check)
