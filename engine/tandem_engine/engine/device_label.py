"""What an engine computes on, as people read it."""

import torch


def device_label(device: str) -> str:
    """`device` with the name of the GPU, as in `cuda:0 (NVIDIA H200)`."""
    return device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def kernel_target(device: str) -> str:
    """The kind of CPU that the kernels of an engine on `device` are compiled for; empty for a GPU."""
    if device != "cpu":
        return ""
    from tandem_engine.kernels.cpu.target import target  # needs llvmlite, which engines on a GPU may lack

    return target().name
