"""What workers of a role run on: a CPU, or the NVIDIA GPUs that `resources.limits` names.

    engine.device  auto (the default)  GPUs where limits name some, else a CPU
                   cuda, cpu           that; cuda without a GPU in limits is refused (`planning.validation`)

Everything that is different for GPUs follows from it: the flag `--device`, the image, the revision. Which of its node's
GPUs a container sees is decided by the device plugin alone: it sets NVIDIA_VISIBLE_DEVICES, no pod of ours names it.
"""

from typing import Literal

from tandem_operator.api.engine import Engine
from tandem_operator.api.pods import Resources
from tandem_operator.builders.quantities import parse_quantity

Device = Literal["cpu", "cuda"]

SHARED_GPU = "nvidia.com/gpu.shared"
"""A device plugin's name for a share of a GPU: by time slices, or by MPS."""
MIG = "nvidia.com/mig-"
"""Parts of a GPU with memory of their own, such as nvidia.com/mig-3g.40gb."""
OTHER_GPUS = ("amd.com/gpu", "gpu.intel.com/i915")


def gpus_of(resources: Resources) -> int:
    """GPUs of one pod, whoever made them; a share or a part of one counts as one."""
    return nvidia_gpus_of(resources) + sum(_count(resources, name) for name in OTHER_GPUS)


def nvidia_gpus_of(resources: Resources) -> int:
    """Those that an engine can run on."""
    return sum(_count(resources, name) for name in resources.limits if _is_nvidia(name))


def shares_gpu(resources: Resources) -> bool:
    """Whether others use the memory of its GPUs too."""
    return _count(resources, SHARED_GPU) > 0


def device_of(engine: Engine, resources: Resources) -> Device:
    """`engine`: as merged for one role."""
    if engine.device in ("cpu", "cuda"):
        return engine.device
    return "cuda" if nvidia_gpus_of(resources) else "cpu"


def nodes_of(engine: Engine, resources: Resources) -> int:
    """Pods of one worker. `engine`: as merged for one role."""
    if engine.nodes is not None:
        return engine.nodes
    ranks, gpus = engine.tensor_parallel_size or 1, gpus_of(resources)
    return ranks // gpus if gpus and ranks % gpus == 0 else 1


def _is_nvidia(name: str) -> bool:
    return name in ("nvidia.com/gpu", SHARED_GPU) or name.startswith(MIG)


def _count(resources: Resources, name: str) -> int:
    return int(parse_quantity(resources.limits.get(name, 0)))
