"""The kernels of `kernels.triton.work_list`, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.work_list")
LANGUAGE = KernelChecks("tandem_testing.triton_kernels.kept_language")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_work_list_kernels(check):
    CHECKS.passes(check)


@pytest.mark.parametrize("check", LANGUAGE.cases)
def test_interpreter_finds_errors_with_what_it_remembers(check):
    LANGUAGE.passes(check)
