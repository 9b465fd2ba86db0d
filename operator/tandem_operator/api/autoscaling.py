"""Who decides how many workers there are, and by what."""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.markers import Api, Count, Rule, Seconds, Share


class RoleScaling(Api, frozen=True, kw_only=True):
    """Bounds and target of one role."""

    min_replicas: Count = 1
    """Never fewer; 0 for both roles allows scale to zero."""
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """Never more."""
    target_queue_seconds: Seconds = 1.0
    """What waits so long is as it should be; what waits longer is backlog, and asks for workers."""
    clear_seconds: Seconds = 30.0
    """A backlog is to be gone within this time: about what a pod takes to start."""
    target_kv_usage: Share = 0.85
    """Share of the KV pages in use above which decode gets more workers."""

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
    """GPUs that both roles may have together."""
    flip_roles: bool = True
    """Change the role of a live worker before adding or removing pods."""
    period_seconds: Seconds = 5.0
    """Time between two decisions."""
    scale_up_window_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    """More is wanted throughout this time before there are more."""
    scale_down_window_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 300.0
    """Fewer would do throughout this time before there are fewer."""
    tolerance: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.1
    """Relative distance from the target that changes nothing."""
    max_step_up: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """Workers that one decision may add to a role."""
    max_step_down: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Workers that one decision may take from a role."""
    idle_seconds_to_zero: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 0.0
    """Without any request for so long both roles go to 0; 0: never. The first request then waits in the gateway."""
    cooldown_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 30.0
    """After a role has changed, it does not change in the other direction for so long."""
