"""Scales and zero points that several inputs of a matrix share, and checks of the tensors that hold them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem_engine.errors import CheckpointError
from tandem_engine.model.safetensors_file import StoredTensor

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def group_count(inputs: int, group_size: int, tensor: StoredTensor) -> int:
    """Groups of so many inputs, one of all of them for a size of −1. Raises `CheckpointError` for a rest."""
    if group_size == -1:
        return 1
    if inputs % group_size:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has {inputs} inputs, which are no whole number of groups of "
            f"group_size {group_size} in config.json's quantization_config"
        )
    return inputs // group_size


def require(
    parts: Mapping[str, StoredTensor], suffix: str, shape: tuple[int, ...], dtypes: frozenset[torch.dtype]
) -> None:
    """Raise `CheckpointError` when the tensor of `suffix` is there and is not of that shape and one of these dtypes."""
    tensor = parts.get(suffix)
    if tensor is None:
        return
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}; its matrix and config.json's "
            f"quantization_config imply {list(shape)}"
        )
    if tensor.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; expected {names}")


def checked_order(order: Tensor | None, inputs: int, groups: int) -> Tensor | None:
    """int64 [inputs]: the group of each, None where they are in order.

    Raises `ValueError` when `order` names a group that does not exist.
    """
    if order is None:
        return None
    if order.numel() and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise ValueError(f"its group indices go from {int(order.min())} to {int(order.max())}; it has {groups} groups")
    in_order = torch.arange(inputs, dtype=order.dtype) // (inputs // groups)
    return None if torch.equal(order, in_order) else order.long()


def two(tensor: StoredTensor) -> tuple[int, int]:
    """Both sizes of a matrix. Raises `CheckpointError` when it is none."""
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}; expected a matrix")
    return tensor.shape[0], tensor.shape[1]
