"""All weights of a model are found, however a layer holds them."""

import pytest
import torch

from tandem_engine.config import MoeConfig
from tandem_engine.engine.loaded_model import weight_memory
from tandem_engine.model.decoder import build_decoder
from tandem_engine.model.layers.linear import projection
from tandem_engine.model.tensor_names import expected_shapes
from tandem_testing.random_weights import RandomWeights, small_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [{}, {"moe": MoeConfig(num_experts=2, experts_per_token=1, intermediate_size=32, normalize=True)}],
    ids=["plain", "experts"],
)
def test_weight_memory_counts_every_matrix_of_a_model(fields, dtype):
    config = small_config(hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=32, **fields)
    model = build_decoder(config, RandomWeights(config=config, dtype=dtype), positions=config.max_position)
    found = dict(weight_memory(model))
    matrices = sum(torch.Size(shape).numel() for shape in expected_shapes(config).values() if len(shape) == 2)
    assert sum(found.values()) >= matrices * dtype.itemsize


def test_packed_weight_lies_where_its_panels_do():
    packed = projection(torch.randn(300, 256))
    found = weight_memory(packed)
    few = getattr(packed, "few", None)
    if few is None:
        pytest.skip("oneDNN keeps weights otherwise on this CPU")
    assert (few.panels.address, few.panels.count * few.panels.bytes_each) in found


def test_view_counts_with_all_that_it_is_a_view_of():
    whole = torch.zeros(100)
    assert weight_memory((whole[10:20], [whole])) == 2 * [(whole.data_ptr(), 400)]
