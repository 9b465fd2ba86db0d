"""The operator's own parser reads what the chart puts on its command line."""

from typing import Any

import pytest
import yaml

from tandem_operator.cli import options_of, parser
from tandem_operator.controller.runtime import RuntimeOptions
from tandem_operator.settings import OperatorSettings
from tandem_testing.helm_library import CHARTS, NEEDS_HELM


def read(manifests: list[dict[str, Any]]) -> RuntimeOptions:
    """The command line of the operator's container, and what its probes ask."""
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["tandem-operator"]
    arguments = parser().parse_args(container["args"])
    assert arguments.http_port == container["ports"][0]["containerPort"]
    return options_of(arguments)


def test_manifest_without_helm_watches_all_namespaces():
    options = read(list(yaml.safe_load_all((CHARTS / "install.yaml").read_text())))
    assert options.namespaces == ()
    assert options.election is not None
    assert options.election.name == "tandem-operator"
    assert options.election.namespace == options.settings.operator_namespace == "tandem-system"


@NEEDS_HELM
@pytest.mark.xdist_group("helm")
def test_values_become_settings(helm):
    values = {
        "namespaces": ["models", "chat"],
        "modelImages": {"engine": "r/e:1", "cudaEngine": "r/e:1-cuda", "services": "r/s:2", "redis": "r/r:3"},
        "metrics": {"port": 9000},
        "extraArgs": ["--canary=off", "--workers=2"],
    }
    options = read(helm.render("tandem", values, release="prod", namespace="llm"))
    assert options.namespaces == ("chat", "models")
    settings = options.settings
    assert (settings.engine_image, settings.services_image, settings.redis_image) == ("r/e:1", "r/s:2", "r/r:3")
    assert settings.cuda_engine_image == "r/e:1-cuda"
    assert settings.operator_namespace == "llm"
    assert settings.canaries is False
    assert (options.workers, options.http_port) == (2, 9000)
    assert options.election is not None
    assert options.election.name == "prod-tandem-operator"


@NEEDS_HELM
@pytest.mark.xdist_group("helm")
def test_images_that_no_value_names_are_the_operators_own(helm):
    assert read(helm.render("tandem")).settings.engine_image == OperatorSettings().engine_image
