import pytest
import torch

from tandem_engine.forward.future_map import int64_view


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 2)])
def test_array_is_the_tensor_s_memory(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    array = int64_view(tensor)
    assert array.tolist() == tensor.tolist()
    tensor += 5
    assert array.tolist() == tensor.tolist()


def test_strided_or_foreign_dtype_array_has_no_view():
    with pytest.raises(AssertionError, match="strides"):
        int64_view(torch.arange(8)[::2])
    with pytest.raises(AssertionError, match="int64"):
        int64_view(torch.zeros(3))
