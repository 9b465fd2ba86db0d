"""Digest kernels on a real device."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_kernels_on_a_device_equal_the_loops_of_a_cpu():
    from tandem_testing import triton_digests

    triton_digests.agree("cuda")


def test_a_pool_on_a_device_has_the_digests_of_one_on_a_cpu():
    from tandem_testing import triton_digests

    triton_digests.pools_agree("cuda")
