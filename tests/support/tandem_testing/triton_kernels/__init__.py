"""How Triton kernels are tested where there is no device.

    checks.py          names and runs the checks of a module; what tests import
    child.py           the process that they run in
    server.py          forks it, with torch and Triton imported
    bfloat16.py        which the interpreter gets wrong
    scalars.py         which some versions of it get wrong
    ahead_of_time.py   machine code for a device that is not there, and what it takes of it
    any other module   the checks of one kernel

A module of checks has functions of two kinds:

    check_NAME(device)    computes with the kernel on `device` and compares. Under `make test` that is "cpu", and Triton
                          interprets the kernel; tests/gpu calls the same functions with "cuda".
    compile_NAME()        compiles the kernel for devices and asserts what it takes of them. One that takes an
                          architecture is a check for Hopper, and one for Ampere in `make test-long`.

Each kind has a process of its own for the whole module: how Triton runs is decided when it is imported, which takes
seconds. Its test file says no more than

    CHECKS = KernelChecks("tandem_testing.triton_kernels.digests")
    pytestmark = CHECKS.marks

    @pytest.mark.parametrize("check", CHECKS.cases)
    def test_digest_kernels(check):
        CHECKS.passes(check)
"""
