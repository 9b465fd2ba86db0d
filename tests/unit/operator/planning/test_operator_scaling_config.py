"""What a spec says of scaling reaches the law, field by field."""

from dataclasses import fields

from tandem_operator.api.model_service import Autoscaling, RoleScaling
from tandem_operator.scaling.policy import ScalingConfig
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_testing.kube_cluster import service_of


def test_every_setting_arrives():
    given = {
        "mode": "internal",
        "gpuBudget": 17,
        "flipRoles": False,
        "scaleUpWindowSeconds": 11,
        "scaleDownWindowSeconds": 12,
        "tolerance": 0.2,
        "maxStepUp": 7,
        "maxStepDown": 3,
        "idleSecondsToZero": 13,
        "cooldownSeconds": 14,
    }
    scaling = {"minReplicas": 2, "maxReplicas": 9, "targetQueueSeconds": 3, "targetKvUsage": 0.5, "clearSeconds": 8}
    prefill = {"scaling": scaling, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    config = scaling_config(service_of(autoscaling=given, prefill=prefill))
    assert (config.gpu_budget, config.flip_roles, config.tolerance) == (17, False, 0.2)
    assert (config.scale_up_window_s, config.scale_down_window_s, config.cooldown_s) == (11, 12, 14)
    assert (config.max_step_up, config.max_step_down, config.idle_s_to_zero) == (7, 3, 13)
    assert (config.prefill.least, config.prefill.most, config.prefill.gpus) == (2, 9, 1)
    targets = config.prefill.targets
    assert (targets.queue_seconds, targets.kv_usage, targets.clear_seconds) == (3, 0.5, 8)


def test_defaults_of_the_schema_are_those_of_the_law():
    config = scaling_config(service_of())
    plain = ScalingConfig(prefill=config.prefill, decode=config.decode)
    assert config == plain
    assert len(fields(ScalingConfig)) - 2 == len(Autoscaling.__struct_fields__) - 2, "but mode and the period"
    assert len(RoleScaling.__struct_fields__) == 5
