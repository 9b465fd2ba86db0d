"""A spec as the autoscaler wants it."""

from tandem_operator.api.roles import RoleName
from tandem_operator.builders.devices import gpus_of
from tandem_operator.builders.served import Served
from tandem_operator.scaling.law import RoleBounds, ScalingConfig
from tandem_operator.scaling.need import Targets


def scaling_config(service: Served) -> ScalingConfig:
    """Bounds, targets and windows of both roles."""
    given = service.spec.autoscaling
    return ScalingConfig(
        prefill=_bounds(service, "prefill"),
        decode=_bounds(service, "decode"),
        gpu_budget=given.gpu_budget,
        flip_roles=given.flip_roles,
        scale_up_window_s=given.scale_up_window_seconds,
        scale_down_window_s=given.scale_down_window_seconds,
        tolerance=given.tolerance,
        max_step_up=given.max_step_up,
        max_step_down=given.max_step_down,
        idle_s_to_zero=given.idle_seconds_to_zero,
        cooldown_s=given.cooldown_seconds,
    )


def _bounds(service: Served, name: RoleName) -> RoleBounds:
    role = service.role(name)
    return RoleBounds(
        least=role.scaling.min_replicas,
        most=role.scaling.max_replicas,
        targets=Targets(
            queue_seconds=role.scaling.target_queue_seconds,
            kv_usage=role.scaling.target_kv_usage,
            clear_seconds=role.scaling.clear_seconds,
        ),
        gpus=gpus_of(role.resources) * service.nodes(name),
    )
