"""Devices by name: which one a rank computes on, whether it is there, and that a thread's kernels run on it."""

import torch

from tandem_engine.errors import ConfigError


def device_of_rank(device: str, rank: int) -> str:
    """`cpu` for all ranks; of GPUs each rank of a node has its own, from the one that is named, or the first, upwards.

    `rank` is counted on its node. Negated it leads from the device of a rank back to that of the node's first.
    """
    named = torch.device(device)
    return device if named.type == "cpu" else f"{named.type}:{(named.index or 0) + rank}"


def require_device(device: str, *, ranks: int = 1) -> None:
    """Raise `ConfigError` unless `device`, as `--device` takes it, and those of the other ranks can compute here."""
    if device == "cpu":
        return
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device {device} needs a build of torch with CUDA, and this is {torch.__version__}: install one "
            "(TANDEM_TORCH=cuda make up), or serve with --device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device}: this process sees no GPU (nvidia-smi lists those of the machine, CUDA_VISIBLE_DEVICES "
            "those of a process); serve with --device cpu"
        )
    last, count = torch.device(device_of_rank(device, ranks - 1)).index or 0, torch.cuda.device_count()
    if last >= count:
        wanted = f"--device {device}" if ranks == 1 else f"--device {device} with {ranks} ranks on this machine"
        raise ConfigError(f"{wanted} needs GPU {last}, and this process sees {count}, numbered from 0")


def use_device(device: str | torch.device) -> None:
    """Have what the calling thread launches run on `device`.

    CUDA keeps that for each thread, and a new thread has the first GPU. Kernels would be launched there whatever GPU
    their tensors are on, and a thread that has no GPU yet has no context in which UCX could copy.
    """
    named = torch.device(device)
    if named.type == "cuda":
        torch.cuda.set_device(named.index or 0)
