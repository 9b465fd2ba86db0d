import pytest
import torch

from tandem_engine.forward.future_map import borrowed


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 2)])
def test_array_is_the_tensor_s_memory(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    array = borrowed(tensor)
    assert array.tolist() == tensor.tolist()
    tensor += 5
    assert array.tolist() == tensor.tolist()


def test_strided_or_foreign_dtype_array_has_no_view():
    with pytest.raises(AssertionError, match="strides"):
        borrowed(torch.arange(8)[::2])
    with pytest.raises(AssertionError, match="int64"):
        borrowed(torch.zeros(3))
