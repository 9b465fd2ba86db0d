"""What must be equal on every node of an engine, as text that a person can compare.

Ranks run in lock-step: one that pages, batches or drafts otherwise than rank 0 would make all of them wait for ever. So
nodes are compared before anything is loaded, and a difference is named. The address of the leader is among it: a node
that was meant for another group's engine is refused, too.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import version

import msgspec
import torch

from tandem_engine.config import EngineConfig

OWN = frozenset({"model_path", "threads", "cpus", "operation", "parallel.node_rank", "speculative.draft_model_path"})
"""Of each node: where files lie there, how many cores it has, and which node it is."""


def settings_of(config: EngineConfig, fingerprint: str) -> dict[str, str]:
    """By name. `fingerprint` is the checkpoint's."""
    stated = dict(_flat("", msgspec.to_builtins(config)))
    return {**stated, "checkpoint": fingerprint, "tandem": version("tandem"), "torch": str(torch.__version__)}


def difference(leader: Mapping[str, str], node: Mapping[str, str]) -> str | None:
    """The first setting that differs, in one clause; None if none does."""
    for name in sorted({*leader, *node}):
        here, there = leader.get(name, "nothing"), node.get(name, "nothing")
        if here != there:
            return f"{name} is {there} there and {here} on node 0"
    return None


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if path in OWN:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}" if path else str(name), inner)
    else:
        yield path, msgspec.json.encode(value).decode()
