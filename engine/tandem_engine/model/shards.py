"""The tensors of a checkpoint, whether it is one safetensors file or an index with shards."""

from pathlib import Path

from tandem_engine.errors import CheckpointError
from tandem_engine.model.directory import ModelDirectory
from tandem_engine.model.json_file import read_json_object, shown
from tandem_engine.model.safetensors_file import StoredTensor, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 1 << 26
MAX_SHARDS = 10_000
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def open_tensors(directory: ModelDirectory) -> dict[str, StoredTensor]:
    """Read and check all headers; no tensor data. As in transformers, a single file wins over an index.

    Raises:
        CheckpointError: weights are absent, in another format, broken, or disagree with their index.
    """
    if directory.has(SINGLE):
        return read_header(directory.file(SINGLE))
    if directory.has(INDEX):
        return _open_shards(directory)
    for name in PICKLED:
        if directory.has(name):
            raise CheckpointError(
                f"{directory.path / name} is in pickle format, which can run code when loaded, and is never "
                "read; convert the checkpoint to safetensors"
            )
    raise CheckpointError(f"no {SINGLE} and no {INDEX} in {directory.path}")


def _open_shards(directory: ModelDirectory) -> dict[str, StoredTensor]:
    index = directory.file(INDEX)
    weight_map = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(directory.file(shard, named_by=str(index))).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {shown(name)} stands in two shards: {tensors[name].path} and {tensor.path}"
                )
            tensors[name] = tensor
    _require_agreement(index, weight_map, tensors)
    return tensors


def _require_agreement(index: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(f"{index} puts tensor {shown(name)} into {shown(shard)}, which lacks it")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor.path} holds tensor {shown(name)}, which {index} does not name")


def _weight_map(index: Path) -> dict[str, str]:
    value = read_json_object(index, max_bytes=MAX_INDEX).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{index}: weight_map must map tensor names to files, got {shown(value)}")
    result: dict[str, str] = {}
    for name, shard in value.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: tensor {shown(name)} must map to a file name, got {shown(shard)}")
        result[name] = shard
    if len(set(result.values())) > MAX_SHARDS:
        raise CheckpointError(f"{index} names more than {MAX_SHARDS} shards")
    return result
