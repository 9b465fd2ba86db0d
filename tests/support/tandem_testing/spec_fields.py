"""Fields of the full example of a ModelService, and other values for each."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
FieldPath = tuple[str | int, ...]

FULL_SPEC: Manifest = json.loads(
    json.dumps(yaml.safe_load((Path(__file__).parents[3] / "examples/full.yaml").read_text())["spec"])
)
"""Parts that are one in YAML (`*pod`) are copies here: a change of one is none of the other."""

GATEWAY_PARTS = ("images", "redis", "drainSeconds", "security", "observability")

FULL_GATEWAY_SPEC: Manifest = {
    **{name: part for name, part in FULL_SPEC["gateway"].items() if name != "inferencePool"},
    **{name: FULL_SPEC[name] for name in GATEWAY_PARTS},
    "claims": ["models", "adapters"],
    "pod": {name: part for name, part in FULL_SPEC["prefill"]["pod"].items() if name != "patch"},
}
"""Of a ModelGateway: every field but an inferencePool, which is refused, and those of pods that an administrator has
to allow."""

WORDS = """
tcp none full error float32 int8 transformers swap ClusterIP Never fcfs write_back
NoExecute FailClose Equal Exists NGRAM NoSchedule internal model strict
512Mi 1 cpu 2h 10.2.0.0/16
rediss+sentinel://elsewhere:1/main/0
""".split()
"""For fields that take one of a few."""


def leaves(part: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Path and value of each field that holds no other fields, entries of lists included."""
    if isinstance(part, dict | list):
        for key, one in part.items() if isinstance(part, dict) else enumerate(part):
            yield from leaves(one, (*path, key))
    else:
        yield path, part


def others(value: Any) -> Iterator[Any]:
    """Values that may be in the place of this one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value / 2, 1, 0.75, value * 2)
    else:
        yield from (f"{value}x", *WORDS)


def with_field(spec: Manifest, path: FieldPath, value: Any) -> Manifest:
    """A copy of `spec` with another value at `path`."""
    changed = copy.deepcopy(spec)
    part: Any = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return changed
