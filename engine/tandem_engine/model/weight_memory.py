"""Where the weights of a model lie in main memory, whatever its layers keep them in."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor


def weight_memory(model: object) -> list[tuple[int, int]]:
    """Address and bytes of every tensor on a CPU that `model`, made of dataclasses and tuples of them, holds."""
    return list(_memory(model, set()))


def _memory(part: object, seen: set[int]) -> Iterator[tuple[int, int]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        if part.device.type == "cpu":
            yield _place(part)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _memory(getattr(part, each.name), seen)
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _memory(each, seen)


def _place(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    try:
        return int(torch.ops.mkldnn.data_ptr(tensor)), int(torch.ops.mkldnn._nbytes(tensor))
    except (AttributeError, RuntimeError):
        return 0, 0  # a torch, or a build of it, that does not say where an opaque tensor lies
