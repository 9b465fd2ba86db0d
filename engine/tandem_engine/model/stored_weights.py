"""All tensors of a checkpoint under our names, whatever its files call them and however they store them."""

from tandem_engine.model.directory import ModelDirectory
from tandem_engine.model.expert_tensors import canonical_experts
from tandem_engine.model.kv_scales import without_scales
from tandem_engine.model.quantization.dequantized import dequantized
from tandem_engine.model.quantization.interface import WeightFormat
from tandem_engine.model.safetensors_file import ReadableTensor
from tandem_engine.model.shards import open_tensors


def open_weights(directory: ModelDirectory, scheme: WeightFormat | None) -> dict[str, ReadableTensor]:
    """Headers alone are read. Scales of KV are no weights and left out: see `kv_scales`.

    Raises:
        CheckpointError: a file is absent or broken, or parts of a quantized matrix do not fit each other.
    """
    return canonical_experts(dequantized(without_scales(open_tensors(directory)), scheme))
