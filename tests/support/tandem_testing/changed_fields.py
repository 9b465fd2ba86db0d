"""Specs in which every field of a schema has another value than by default, and what the operator makes of each.

    SPECS     by kind: a few specs that together set every field; fields that exclude one another are in different ones
    places    the fields that a spec sets, by their paths in the schema
    effects   what one field adds to the objects, and takes away from them: the plan with it against the plan without

Values follow from the schema, and from `VALUES` where it does not say enough. So a field that is added has a place at
once, or `complete` says that it needs a value.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec

from tandem_operator.builders.model_cache import SPEC
from tandem_testing.schema_walk import Schema
from tandem_testing.spec_fields import FieldPath, Manifest, others, with_field

_ADAPTER = "0123456789abcdef" * 2
_HUB = {
    "id": "org/sql",
    "revision": "v2",
    "tokenSecret": {"name": "hub", "key": "token"},
    "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "6Gi"}},
}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_TERM = {"matchExpressions": [{"key": "rack", "operator": "Exists"}]}

VALUES: Mapping[str, Any] = {
    r"\.tolerations": [
        {"key": "io", "operator": "Equal", "value": "fast", "effect": "NoExecute", "tolerationSeconds": 7},
        {"key": "gpu", "operator": "Exists"},
    ],
    r"\.env": [
        {"name": "MODE", "value": "fast"},
        {"name": "LICENCE", "secretKeyRef": {"name": "licence", "key": "text"}},
    ],
    r"\.affinity": {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": [_TERM]}}},
    r"\.topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}],
    r"\.patch": {"spec": {"hostAliases": [{"ip": "10.0.0.9", "hostnames": ["license.example"]}]}},
    r"\.adapters": [
        {
            "name": "sql",
            "source": {"claim": {"claimName": "adapters", "path": "sql"}},
            "digest": _ADAPTER,
            "pinned": True,
        },
        {"name": "law", "source": {"huggingFace": {**_HUB, "cacheClaim": "hub"}}, "digest": _ADAPTER},
        {
            "name": "tax",
            "source": {"huggingFace": {**_HUB, "id": "org/tax", "sizeLimit": "9Gi"}},
            "digest": _ADAPTER,
        },
    ],
    r"\.resources\.requests": {"memory": "3Gi"},
    r"\.resources\.limits": {"memory": "5Gi"},
    r"\.(scratchLimit|sharedMemory|sizeLimit|size)": "7Gi",
    r"\.huggingFace\.id": "org/mini",
    r"\.url": "rediss+sentinel://tandem@sentinel-0.example:26380/main/3",
    r"\.ucx": {"UCX_TLS": "tcp"},
    r"\.storage\.node": {"folder": "/mnt"},
    r"\.rdma\.resource": "rdma/hca",
    r"\.cidr": "10.7.0.0/16",
    r"\.(otlpTracesEndpoint|endpoint)": "http://collector.example:4318/v1",
    r"\.engine\.args": ["--watermark=0.03"],
    r"\.args": ["--explain-candidates=7"],
    r"\.timeouts\.request": "3h",
    r"\.timeouts\.backendRequest": "2h",
    r"\.routerPolicy": "prefill=locality,decode=least_loaded",
    r"\.engine\.device": "cpu",
    r"\.algorithm": "EAGLE",
    r"\.spec\.gateway\.tokenizer": "workers",
    r"\.mode": "internal",
    r"\.percentile": 0.9,
    r"\.(replicas|processes|maxSurge|nodes|count)": 2,
    r"\.minReplicas": 2,
    r"\.maxReplicas": 9,
    r"\.tensorParallelSize": 4,
    r"\.spec\.gatewayRef\.name": "front",
    r"\.spec\.digest": _ADAPTER,
}
"""For the first pattern that matches the end of a path."""

OF_BOTH_ROLES = r"\.spec\.(prefill|decode)\.engine\.(dtype|kvCacheDtype|contextLength|pageSize|quantization|modelImpl)"
"""Of a role they are refused."""

_RANKS = "(tensorParallelSize|nodes|memFractionStatic)"
_WITHOUT_RANKS = rf"\.spec\.(prefill\.|decode\.)?engine\.({_RANKS}|storage\.directory)"
_GPU: Manifest = {"resources": {"limits": {"memory": "64Gi", "nvidia.com/gpu": "1"}}}
_FILES: Manifest = {"engine": {"storage": {"directory": "/nvme"}, "hostCache": {"sizeGib": 3}}}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One spec: fields that match `only` and not `but`, and `more`, whose values go before those of the schema."""

    only: str = r"\.spec"
    but: str = r"(?!)"
    more: Manifest = field(default_factory=dict)

    def spec(self, schema: Schema) -> Manifest:
        """`schema`: of specs. Raises `ValueError` for a field without a value."""
        made: Manifest = _over(complete(schema, ".spec", self._has) or {}, self.more)
        return made

    def _has(self, path: str) -> bool:
        return re.match(self.only, path) is not None and re.match(self.but, path) is None


SPECS: Mapping[str, Mapping[str, Example]] = {
    "ModelService": {
        "managed": Example(
            but=r"\.spec\.(model\.(claim|image|huggingFace|cacheRef)|redis\.external|gatewayRef|kernelCacheClaim"
            r"|engine\.device|(prefill|decode)\.engine|autoscaling\.mode|rollout\.paused|transfer\.topology"
            r"|security\.networkPolicies)|" + _WITHOUT_RANKS,
        ),
        "external": Example(
            only=r"\.spec\.(model\.huggingFace|redis\.external|kernelCacheClaim|prefill\.engine|transfer\.topology"
            r"|security\.networkPolicies)",
            but=rf"\.spec\.(model\.huggingFace\.cacheClaim|prefill\.engine\.device)|{_WITHOUT_RANKS}|{OF_BOTH_ROLES}",
            more={"engine": {"dtype": "bfloat16"}, "prefill": _GPU},
        ),
        "shared": Example(
            only=r"\.spec\.(model\.huggingFace|gatewayRef|decode\.engine)",
            but=rf"\.spec\.model\.huggingFace\.sizeLimit|{_WITHOUT_RANKS}|{OF_BOTH_ROLES}",
            more={"engine": {"dtype": "bfloat16"}, "decode": _GPU},
        ),
        "ranks": Example(only=rf"\.spec\.(model\.claim|engine\.{_RANKS})"),
        "prefill-ranks": Example(
            only=rf"\.spec\.(model\.claim|autoscaling|prefill\.engine\.{_RANKS})",
            more={"prefill": {"scaling": {"minReplicas": 0}}, "decode": {"scaling": {"minReplicas": 0}, **_FILES}},
        ),
        "decode-ranks": Example(
            only=rf"\.spec\.(model\.claim|prefill\.engine\.device|decode\.engine\.{_RANKS})",
            more={"engine": {"dtype": "bfloat16"}, "prefill": {**_GPU, **_FILES}},
        ),
        "files": Example(
            only=r"\.spec\.(model\.claim|engine\.device)", more={**_FILES, "prefill": _GPU, "decode": _GPU}
        ),
    },
    "ModelGateway": {
        "front": Example(but=r"\.spec\.(inferencePool|redis\.external|security\.networkPolicies)"),
        "external-front": Example(only=r"\.spec\.(redis\.external|authSecret|security\.networkPolicies)"),
    },
    "ModelCache": {
        "made": Example(but=r"\.spec\.storage\.(claim|node)"),
        "given": Example(but=r"\.spec\.storage\.(newClaim|node)"),
    },
}


def complete(part: Schema, path: str, has: Callable[[str], bool]) -> Any:
    """A value of this schema, with every field for which `has`; None for one without any."""
    for pattern, value in VALUES.items():
        if re.search(f"{pattern}$", path):
            return copy.deepcopy(value) if has(path) else None
    if "properties" in part:
        made = {name: complete(one, f"{path}.{name}", has) for name, one in part["properties"].items()}
        return {name: value for name, value in made.items() if value is not None} or None
    if "properties" in part.get("items", {}):
        entry = complete(part["items"], f"{path}[0]", has)
        return None if entry is None else [entry]
    return _value(part, path) if has(path) else None


def _value(part: Schema, path: str) -> Any:
    """One that is not the default. Numbers and names follow from the path, so that few are equal."""
    number = 3 + crc32(path.encode()) % 40
    match part:
        case {"enum": values}:
            return next(one for one in reversed(values) if one != part.get("default"))
        case {"type": "boolean"}:
            return not part.get("default", False)
        case {"type": "integer"}:
            return part.get("minimum", 0) + number % (part.get("maximum", 1000) - part.get("minimum", 0))
        case {"type": "number"}:
            return number / 50 if part.get("maximum") == 1.0 else float(number)
        case {"type": "array"}:
            return [_value(part["items"], f"{path}[0]")]
        case {"additionalProperties": _}:
            return {"example.com/key": _name(path, "-")}
        case {"type": "string"}:
            names = (_name(path, "-"), f"/{_name(path, '-')}", _name(path, "_"))
            found = [one for one in names if re.search(part.get("pattern", ""), one)]
            if found:
                return found[0]
    raise ValueError(f"{path}: no value follows from {part}; add one to VALUES")


def _name(path: str, joint: str) -> str:
    words = re.findall(r"[A-Za-z]+", path.removeprefix(".spec"))
    return joint.join(words[-3:]).lower()


def _over(base: Any, more: Any) -> Any:
    if isinstance(base, dict) and isinstance(more, dict):
        return {**base, **{name: _over(base.get(name), value) for name, value in more.items()}}
    return copy.deepcopy(more)


def places(part: Schema, value: Any, path: str = ".spec", at: FieldPath = ()) -> Iterator[tuple[str, FieldPath]]:
    """Path in the schema, and in the spec, of each field that `value` sets and that has no fields itself."""
    if "properties" in part:
        for name, one in value.items():
            yield from places(part["properties"][name], one, f"{path}.{name}", (*at, name))
    elif "properties" in part.get("items", {}):
        for number, one in enumerate(value):
            yield from places(part["items"], one, f"{path}[0]", (*at, number))
    else:
        yield path, at


Facts = frozenset[str]
Outcome = Mapping[str, Manifest] | None
"""Objects by kind and name; None for a spec that is refused."""


def effects(
    spec: Manifest, at: FieldPath, outcome: Callable[[Manifest], Outcome], whole: Mapping[str, Manifest]
) -> tuple[Facts, Facts]:
    """What the field adds to `whole`, the outcome of `spec`, and what it takes away: nothing for one without effect.

    Compared is the spec without it; and where that is refused, or no spec, the spec with another value.
    """
    for other in _without(spec, at):
        if other == spec:
            continue
        try:
            former = outcome(other)
        except (msgspec.ValidationError, ValueError, AssertionError):
            # The planner asserts what rules of the schema guarantee.
            continue
        if former is not None:
            names = [name for name in whole.keys() | former.keys() if whole.get(name) != former.get(name)]
            now, then = (
                frozenset().union(*(facts(name, some[name]) for name in names if name in some))
                for some in (whole, former)
            )
            return now - then, then - now
    raise AssertionError(f"{'.'.join(map(str, at))}: no spec without it or with another value is accepted")


def _without(spec: Manifest, at: FieldPath) -> Iterator[Manifest]:
    reduced = copy.deepcopy(spec)
    part: Any = reduced
    for key in at[:-1]:
        part = part[key]
    value = part.pop(at[-1])
    yield reduced
    yield from (with_field(spec, at, other) for other in others(value))


def facts(name: str, manifest: Manifest) -> Facts:
    """Every value of an object with its place. Words of a list are facts with the word before them."""
    body = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata", "status")}
    notes = {key: manifest["metadata"].get(key, {}) for key in ("labels", "annotations")}
    # A hash of the rest says nothing of a field.
    notes["annotations"] = {key: value for key, value in notes["annotations"].items() if key != SPEC}
    return frozenset(_facts(name, body | notes))


def _facts(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _facts(f"{path} {key}", one)
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        for before, word in zip(["", *value], value, strict=False):
            yield f"{path}: {before} {word}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _facts(f"{path}[{one.get('name', number) if isinstance(one, dict) else number}]", one)
    elif value not in ("", None):
        # API servers keep no empty text.
        yield f"{path}={json.dumps(value)}"
