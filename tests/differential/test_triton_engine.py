"""Engines whose attention is Triton's, interpreted, against transformers."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.triton_engine")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_triton_engine(check):
    CHECKS.passes(check)
