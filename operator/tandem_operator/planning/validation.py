"""What is wrong with a spec that its schema lets pass. Found before anything is made; running pods stay untouched.

RELIABILITY E7: each problem names the field, its value and what to do.
"""

from collections.abc import Iterator

from tandem_operator.api.pods import Resources
from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.builders.engine_flags import merged
from tandem_operator.builders.quantities import parse_quantity
from tandem_operator.builders.served import Served

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915")


def problems_of(service: Served) -> list[str]:
    """One sentence each; empty when the spec can be served."""
    return [*_names(service), *_quantities(service), *(text for role in ROLES for text in _ranks(service, role))]


def gpus_of(resources: Resources) -> int:
    """GPUs of one pod."""
    return sum(int(parse_quantity(resources.limits.get(name, 0))) for name in GPU_RESOURCES)


def _names(service: Served) -> Iterator[str]:
    if service.model_name in service.spec.aliases:
        yield f"spec.aliases: {service.model_name!r} is the model's own name already; take it out"


def _quantities(service: Served) -> Iterator[str]:
    spec = service.spec
    parts = [
        ("prefill", spec.prefill.resources),
        ("decode", spec.decode.resources),
        ("gateway", spec.gateway.resources),
    ]
    if spec.redis.managed is not None:
        parts.append(("redis.managed", spec.redis.managed.resources))
    for path, resources in parts:
        for name, least in resources.requests.items():
            most = resources.limits.get(name)
            if most is not None and parse_quantity(least) > parse_quantity(most):
                yield f"spec.{path}.resources.requests[{name}]: {least} is above its limit {most}; raise the limit"


def _ranks(service: Served, role: RoleName) -> Iterator[str]:
    part = service.role(role)
    ranks = merged(service.spec.engine, part.engine).tensor_parallel_size or 1
    gpus = gpus_of(part.resources)
    if gpus and ranks > gpus and ranks % gpus == 0:
        yield (
            f"spec.{role}: tensorParallelSize {ranks} with {gpus} GPUs in resources.limits would need a worker of "
            f"{ranks // gpus} pods (a LeaderWorkerSet), which this version does not make: an engine's ranks meet on "
            f"one machine; give each pod {ranks} GPUs, or set tensorParallelSize to {gpus}"
        )
    elif gpus and ranks != gpus:
        yield (
            f"spec.{role}: tensorParallelSize {ranks} with {gpus} GPUs in resources.limits; each rank has one GPU: "
            f"make them equal"
        )
