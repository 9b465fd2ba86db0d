"""What is wrong with the adapters of a spec beyond its schema; each error names the field and the fix."""

from collections import Counter
from collections.abc import Iterator

import msgspec

from tandem_operator.api.sources import HuggingFaceSource, ImageSource
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.adapters import folder_of, has_adapters
from tandem_operator.builders.arguments import WORKER, lists_of
from tandem_operator.builders.served import Served

MAX_IN_MEMORY = 256
"""`--max-cpu-loras` where the spec sets none."""

REPLACED_FLAGS = {
    "--lora-dir": "the operator sets it where spec.adapters or spec.adapterClaims are given; remove it",
    "--lora-modules": "its adapters would be below the folder of spec.adapters; list them in spec.adapters instead",
    "--allow-runtime-lora-updating": "spec.adapters and spec.adapterClaims imply it; remove it",
}


def adapter_problems(service: Served) -> Iterator[str]:
    """One sentence each."""
    yield from _names(service)
    yield from _pinned(service)
    yield from _sources(service)
    if has_adapters(service):
        yield from _workers(service)
        yield from _flags(service)


def name_problem(service: Served, name: str) -> str | None:
    """Why an adapter cannot have this name: priority is the model's."""
    if name == service.model_name:
        return f"{name!r} is the name of the model; give the adapter another name"
    if name in service.spec.aliases:
        return f"{name!r} is an alias of the model; give the adapter another name"
    return None


def _names(service: Served) -> Iterator[str]:
    for number, one in enumerate(service.spec.adapters):
        problem = name_problem(service, one.name)
        if problem is not None:
            yield f"spec.adapters[{number}].name: {problem}"
    counted = Counter(one.name for one in service.spec.adapters)
    for name in (name for name, count in counted.items() if count > 1):
        yield f"spec.adapters: {name!r} is given {counted[name]} times; remove all but one"


def most_in_memory(service: Served, role: RoleName) -> int:
    """Adapters that a worker of a role has in memory; one of them has to be free for those that are not pinned."""
    lora = service.engine(role).lora
    return (lora.max_cpu_loras if lora is not None else None) or MAX_IN_MEMORY


def _pinned(service: Served) -> Iterator[str]:
    pinned = sum(one.pinned for one in service.spec.adapters)
    for role in ROLES:
        most = most_in_memory(service, role)
        if pinned >= most:
            yield (
                f"spec.adapters: {pinned} are pinned, and a {role} worker has {most} in memory, one of which has to be "
                f"free for others; pin at most {most - 1}, or raise engine.lora.maxCpuLoras"
            )


def _sources(service: Served) -> Iterator[str]:
    """One image or repository is one volume, which has one setting of each kind."""
    known: dict[str, tuple[int, ImageSource | HuggingFaceSource]] = {}
    for number, one in enumerate(service.spec.adapters):
        image, hub = one.source.image, one.source.hugging_face
        source = hub if image is None else msgspec.structs.replace(image, path="")
        if source is None:
            continue
        place = folder_of(one.source) if image is None else image.reference
        first, other = known.setdefault(place, (number, source))
        if other != source:
            yield (
                f"spec.adapters[{number}].source: the same as of spec.adapters[{first}], with other settings; give "
                f"both the same"
            )


def _workers(service: Served) -> Iterator[str]:
    field = "spec.adapters" if service.spec.adapters else "spec.adapterClaims"
    for role in ROLES:
        if service.device(role) == "cuda":
            yield f"{field}: adapters are computed on CPUs, and {role} workers have GPUs; remove the field"


def _flags(service: Served) -> Iterator[str]:
    for place, (table, words) in lists_of(service).items():
        for number, word in enumerate(words):
            reason = REPLACED_FLAGS.get(table.flag_of(word)) if table is WORKER else None
            if reason is not None:
                yield f"spec.{place}[{number}]: {word.partition('=')[0]}: {reason}"
