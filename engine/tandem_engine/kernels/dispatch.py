"""Who computes: Triton's kernels on a device, torch and compiled loops on a CPU.

Asked once where a layer is built or a tensor's owner comes to be. Nowhere else does a layer ask what its device is.
"""

import torch

TRITON_DEVICES = frozenset({"cuda"})
"""Kinds of devices whose layers are kernels."""


def by_triton(device: torch.device) -> bool:
    """Whether what lies on `device` is computed by kernels."""
    return device.type in TRITON_DEVICES
