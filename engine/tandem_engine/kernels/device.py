"""What a launch depends on of the device that it is for."""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """Of one device."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that a block may have."""


INTERPRETER = DeviceFacts(multiprocessors=2, shared_bytes=163 << 10)
"""What Triton's interpreter stands for: an A100, but for its size."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return bool(triton.knobs.runtime.interpret)


def facts_of(device: torch.device) -> DeviceFacts:
    """Of `device`; of the interpreter if it is no CUDA device."""
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceFacts(multiprocessors=properties["multiprocessor_count"], shared_bytes=properties["max_shared_mem"])
