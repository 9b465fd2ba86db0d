"""Autoscaling: who sets the number of workers, and its targets."""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.markers import Api, Count, Rule, Seconds, Share


class RoleScaling(Api, frozen=True, kw_only=True):
    """Bounds and target of one role."""

    min_replicas: Count = 1
    """Minimum number of workers; 0 for both roles allows scale to zero."""
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """Maximum number of workers."""
    target_queue_seconds: Seconds = 1.0
    """Acceptable wait in seconds; requests that wait longer are backlog and require more workers."""
    clear_seconds: Seconds = 30.0
    """Time in which a backlog is to be cleared, in seconds: about the start time of a pod."""
    target_kv_usage: Share = 0.85
    """Share of KV pages in use above which decode gets more workers."""

    RULES: ClassVar = (
        Rule(
            "(has(self.minReplicas) ? self.minReplicas : 1) <= (has(self.maxReplicas) ? self.maxReplicas : 4)",
            "minReplicas must not be above maxReplicas",
        ),
    )


class Autoscaling(Api, frozen=True, kw_only=True):
    """The autoscaler."""

    mode: Literal["none", "internal", "external"] = "none"
    """none: `replicas` as written. internal: by queue depth, both roles together. external: an HPA, KEDA or
    `kubectl scale` owns the pools."""
    gpu_budget: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Maximum number of GPUs of both roles together."""
    flip_roles: bool = True
    """Change the role of a running worker before adding or removing pods."""
    period_seconds: Seconds = 5.0
    """Seconds between two decisions."""
    scale_up_window_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    """Seconds for which more workers must be required before workers are added."""
    scale_down_window_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 300.0
    """Seconds for which fewer workers must suffice before workers are removed."""
    tolerance: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.1
    """Relative distance from the target within which nothing changes."""
    max_step_up: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """Maximum number of workers that one decision adds to a role."""
    max_step_down: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Maximum number of workers that one decision removes from a role."""
    idle_seconds_to_zero: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 0.0
    """Idle seconds after which both roles scale to 0; 0: never. The first request then waits in the gateway."""
    cooldown_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 30.0
    """Minimum seconds between opposite changes of a role."""
