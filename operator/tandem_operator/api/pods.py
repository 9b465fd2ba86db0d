"""What a resource may say of its pods. A host path, a service account or a privilege may be asked for, and is denied
unless the operator's own flag allows it (`builders.containers`): a user who may write these resources must not get
more than they have [spec-grants-nothing].
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tandem_operator.api.types import (
    LABEL_KEY,
    MAX_LABEL_KEY,
    SUBDOMAIN,
    AbsolutePath,
    Annotations,
    Api,
    DnsName,
    FileName,
    Labels,
    LabelValue,
    MapKey,
    Name,
    Opaque,
    Quantity,
    Rule,
    printable,
    within_folder,
)


class SecretKey(Api, frozen=True, kw_only=True):
    """A key of a Secret in the same namespace."""

    name: Name
    """Name of the Secret."""
    key: FileName
    """Key within it."""


class Resources(Api, frozen=True, kw_only=True):
    """Compute resources of a container, as in a pod."""

    requests: Annotated[dict[MapKey, Quantity], msgspec.Meta(max_length=32)] = {}
    """Minimum amounts, by resource. Those of hugepages and device plugins equal their limits."""
    limits: Annotated[dict[MapKey, Quantity], msgspec.Meta(max_length=32)] = {}
    """Maximum amounts, by resource; GPUs belong here."""


class EnvVar(Api, frozen=True, kw_only=True):
    """An environment variable of the main container."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
    """Name. The operator sets names that begin with TANDEM_, the device plugin NVIDIA_VISIBLE_DEVICES."""
    value: Annotated[str, printable(max_length=4096)] = ""
    """Value."""
    secret_key_ref: SecretKey | None = None
    """Key of a Secret with the value."""

    RULES: ClassVar = (
        Rule("!self.name.startsWith('TANDEM_')", "variables that begin with TANDEM_ are set by the operator"),
        # It would show a container GPUs of its node that it was not given.
        Rule("self.name != 'NVIDIA_VISIBLE_DEVICES'", "NVIDIA_VISIBLE_DEVICES is set by the device plugin"),
        Rule("!(has(self.value) && has(self.secretKeyRef))", "give value or secretKeyRef, not both"),
    )


class Toleration(Api, frozen=True, kw_only=True):
    """A tolerated taint of nodes, as in a pod."""

    key: Annotated[str, msgspec.Meta(pattern=f"^({LABEL_KEY})?$", max_length=MAX_LABEL_KEY)] = ""
    """Taint key; empty with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists or Equal."""
    value: LabelValue = ""
    """Taint value, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; empty: all."""
    toleration_seconds: int | None = None
    """Seconds for which a NoExecute taint is tolerated."""

    RULES: ClassVar = (
        Rule(
            "(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            "a toleration without key is one of every taint: set operator to Exists",
        ),
        Rule(
            "!has(self.value) || self.value == '' || !has(self.operator) || self.operator == 'Equal'",
            "value is for operator Equal",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds is for effect NoExecute",
        ),
    )


class HostPath(Api, frozen=True, kw_only=True):
    """A directory of the node in the main container."""

    path: AbsolutePath
    """Directory of the node. It must exist."""
    mount_path: AbsolutePath
    """Path in the container."""
    read_only: bool = True
    """Mount it read-only."""

    RULES: ClassVar = (within_folder("path"), within_folder("mountPath"))


class PodOverrides(Api, frozen=True, kw_only=True):
    """Changes to the pods of one component."""

    labels: Labels = {}
    """Additional labels. The operator sets those of tandem.dev and app.kubernetes.io."""
    annotations: Annotations = {}
    """Additional annotations, except those that weaken the confinement of a container."""
    node_selector: Labels = {}
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], msgspec.Meta(max_length=32)] = []
    """Taints that the pods tolerate."""
    affinity: Opaque = {}
    """Affinity, as in a pod."""
    topology_spread_constraints: Annotated[list[Opaque], msgspec.Meta(max_length=8)] = []
    """Spread over zones or nodes, as in a pod; the default labelSelector is that of the component. Without it gateways
    and routers prefer different nodes and zones."""
    priority_class_name: Annotated[str, msgspec.Meta(pattern=f"^({SUBDOMAIN})?$", max_length=253)] = ""
    """PriorityClass of the pods."""
    runtime_class_name: Annotated[str, msgspec.Meta(pattern=f"^({SUBDOMAIN})?$", max_length=253)] = ""
    """RuntimeClass of the pods, such as nvidia."""
    scheduler_name: DnsName | None = None
    """Scheduler; default: the cluster's."""
    scratch_limit: Quantity | None = None
    """Size limit of the directory for temporary files; a pod that exceeds it is evicted. Default: 16Gi for a worker,
    4Gi for a gateway or router, 256Mi for Redis."""
    env: Annotated[list[EnvVar], msgspec.Meta(max_length=64)] = []
    """Additional environment variables of the main container."""
    patch: Opaque = {}
    """Partial pod template with `spec` alone: side-cars, init containers and volumes to add, variables and mounts for
    the containers of the operator, hostAliases, dnsConfig, dnsPolicy, resourceClaims. Added containers are restricted
    like those of the operator.
    """
    service_account_name: DnsName | None = None
    """ServiceAccount of the pods, such as a cloud's workload identity; no token is mounted. Denied unless the operator
    runs with `--allow service-accounts`.
    """
    host_paths: Annotated[list[HostPath], msgspec.Meta(max_length=8)] = []
    """Directories of the node in the main container. Denied unless the operator runs with `--allow host-paths`."""
    privileged: bool | None = None
    """Run the main container as root and privileged, which RDMA requires if pods may lock little memory. Denied unless
    the operator runs with `--allow privileged`.
    """

    RULES: ClassVar = (
        Rule(
            "!has(self.labels) || "
            "self.labels.all(k, !k.startsWith('tandem.dev/') && !k.startsWith('app.kubernetes.io/'))",
            "labels of tandem.dev/ and app.kubernetes.io/ are set by the operator",
        ),
        # Kubelets that know these take them for a profile, "unconfined" included.
        Rule(
            "!has(self.annotations) || self.annotations.all(k, !k.startsWith('container.apparmor.security.') && "
            "!k.startsWith('seccomp.security.') && !k.startsWith('container.seccomp.security.'))",
            "AppArmor and seccomp profiles are set by the operator",
        ),
    )


def plain(part: Api) -> dict[str, Any]:
    """The form in a manifest, without fields that have their default."""
    built: dict[str, Any] = msgspec.to_builtins(part)
    return built
