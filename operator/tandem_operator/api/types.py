"""What a field or a type of the custom resources says beyond its type: rules that the API server checks.

Field constraints are `msgspec.Meta` (minimum, pattern, length). What compares fields with each other is a CEL rule on
the class. Both end in the CRD (`api.crds`), so a bad resource is refused at `kubectl apply`, before anything runs.
"""

from typing import Annotated, Any, Literal

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """A rule of `x-kubernetes-validations`. `self` is the object; with `oldSelf` it applies to changes alone."""

    expression: str
    message: str


class Api(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """Part of a custom resource. Decoding is strict: what the schema does not know is an error [specs-refused].

    `RULES` of a subclass are its CEL rules. The string below a field is what `kubectl explain` says of it.
    """


def rules_of(part: type) -> tuple[Rule, ...]:
    """Rules of `part` itself, in the order they are written."""
    rules: tuple[Rule, ...] = part.__dict__.get("RULES", ())
    return rules


GOES_BACK = "(^|/)[.][.](/|$)"
"""A path with a part `..`, as a regular expression."""


def within_folder(field: str) -> Rule:
    """A path that does not leave the folder that it seems to name."""
    return Rule(
        f"!has(self.{field}) || !self.{field}.matches('{GOES_BACK}')",
        f"{field}: '..' leads out of the folder; name the folder itself",
    )


def printable(**limits: Any) -> msgspec.Meta:
    """A string that may stand on a command line or in a log: one line, no control characters."""
    return msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]*$", **limits)


Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
"""Of an object in the same namespace."""

FileName = Annotated[str, msgspec.Meta(pattern=r"^\.?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$", min_length=1, max_length=253)]
"""A key of a Secret or ConfigMap."""

# Names as the API server has them: what it refuses in a pod must not be accepted here.
_WORD = "[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
HOST_NAME = rf"(\*\.)?{SUBDOMAIN}"
"""Of HTTPRoutes; its first label may be a wildcard."""

LABEL_KEY = f"({SUBDOMAIN}/)?{_WORD}"
MAX_LABEL_KEY = 253
"""Kubernetes allows 253 characters before the slash and 63 behind it, which no pattern can say."""

LabelKey = Annotated[str, msgspec.Meta(pattern=f"^{LABEL_KEY}$", min_length=1, max_length=MAX_LABEL_KEY)]
MapKey = Annotated[str, msgspec.Meta(pattern=rf"^{LABEL_KEY}\Z", min_length=1, max_length=MAX_LABEL_KEY)]
"""The same as a key. No schema constrains keys of maps, so Python alone judges them, whose $ lets a line end pass."""
LabelValue = Annotated[str, msgspec.Meta(pattern=f"^({_WORD})?$", max_length=63)]
Labels = Annotated[dict[MapKey, LabelValue], msgspec.Meta(max_length=32)]
Annotations = Annotated[dict[MapKey, Annotated[str, msgspec.Meta(max_length=4096)]], msgspec.Meta(max_length=32)]

ExtendedResource = Annotated[str, msgspec.Meta(pattern=f"^{SUBDOMAIN}/{_WORD}$", min_length=3, max_length=244)]
"""What device plugins offer. Quotas write `requests.` before it, within the 253 characters of a domain."""

DnsName = Annotated[str, msgspec.Meta(pattern=f"^{SUBDOMAIN}$", min_length=1, max_length=253)]
"""Of an object of the whole cluster, or a host."""

AbsolutePath = Annotated[str, msgspec.Meta(pattern=r"^/[-._/a-zA-Z0-9]*$", min_length=1, max_length=1024)]
_PART = "[-_a-zA-Z0-9][-._a-zA-Z0-9]*"

RelativePath = Annotated[str, msgspec.Meta(pattern=rf"^({_PART}(/{_PART})*)?$", max_length=1024)]
"""Below a folder: no leading slash, no part that begins with a dot."""

Image = Annotated[str, msgspec.Meta(pattern=r"^[-._:/@a-zA-Z0-9]+$", min_length=1, max_length=512)]

ModelName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-._:/@A-Za-z0-9]*$", min_length=1, max_length=256)]
"""As clients send it in `model`."""

_AMOUNT = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
Quantity = Annotated[
    Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(pattern=_AMOUNT)],
    msgspec.Meta(extra_json_schema={"x-kubernetes-int-or-string": True, "minimum": 0, "pattern": _AMOUNT}),
]
"""An amount as Kubernetes writes it: 2, 500m, 16Gi."""

Arguments = Annotated[
    list[Annotated[str, msgspec.Meta(pattern=r"^--[a-z][-a-z0-9]*(=[^\x00-\x1f\x7f]*)?$", max_length=1024)]],
    msgspec.Meta(max_length=64),
]
"""Further flags of a command, each one word: --flag or --flag=value."""

Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
HttpUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://[-._:/a-zA-Z0-9\[\]]+$", max_length=512)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]

Opaque = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]
"""An object of the core API, checked by the API server when the pod is made."""


class Condition(Api, frozen=True, kw_only=True):
    """One aspect of the state."""

    type: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """The aspect."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """CamelCase reason, for programs."""
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Details, for people."""
    last_transition_time: str = ""
    """When the status last changed, RFC 3339."""
    observed_generation: int = 0
    """Generation of the spec that it describes."""


Conditions = Annotated[
    list[Condition],
    msgspec.Meta(
        max_length=24,
        extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, RoleName] = ("prefill", "decode")


# One condition of a status.

MAX_MESSAGE = 4096


def condition(kind: str, status: bool | None, reason: str, message: str = "") -> Condition:
    """A condition of no time yet; None is "not known"."""
    word: Literal["True", "False", "Unknown"] = "Unknown" if status is None else "True" if status else "False"
    return Condition(type=kind, status=word, reason=reason, message=message[:MAX_MESSAGE])
