"""Which revision a spec is: a hash of what KV and weights depend on, what computes them included.

Workers of different revisions are never paired: a change of one of these makes new workers beside the old ones
(`planning.rollout`). Everything else is changed within the revision, pod by pod, by its Deployment.
"""

import hashlib

import msgspec

from tandem_operator.api.roles import ROLES
from tandem_operator.builders.served import Served

DIGITS = 8


def revision_of(service: Served) -> str:
    """Equal for equal checkpoints, engine images, devices, pods of a worker, number formats and page sizes; ten years
    from now too.
    """
    spec = service.spec
    parts = {
        "model": msgspec.to_builtins(spec.model),
        "image": service.engine_image("prefill"),
        "dtype": spec.engine.dtype,
        "page_size": spec.engine.page_size,
    }
    devices = {role: service.device(role) for role in ROLES}
    if set(devices.values()) != {"cpu"}:
        # Left out of CPUs', whose revisions are older than this field.
        parts |= {"devices": devices, "decode_image": service.engine_image("decode")}
    nodes = {role: service.nodes(role) for role in ROLES}
    if set(nodes.values()) != {1}:
        # One pod and several are objects of different kinds, which do not take over from each other.
        parts["nodes"] = nodes
    if spec.engine.kv_cache_dtype is not None:
        parts["kv_cache_dtype"] = spec.engine.kv_cache_dtype
    canonical = msgspec.json.encode(parts, order="deterministic")
    return hashlib.blake2b(canonical, digest_size=DIGITS // 2).hexdigest()
