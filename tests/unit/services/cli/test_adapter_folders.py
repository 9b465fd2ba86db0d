"""Adapters that a command refuses before it starts a worker."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AdapterConfig
from tandem_services.cli.flags import require_adapters


@pytest.mark.parametrize("name", ["tandem-mini", "mini"])
def test_adapter_with_a_name_of_the_model_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=f"--lora-modules: '{name}' is a name of the model"):
        require_adapters(AdapterConfig.of({name: tmp_path}), ("tandem-mini", "mini"))


def test_adapter_without_a_folder_is_refused(tmp_path):
    require_adapters(AdapterConfig.of({"sql": tmp_path}), ("mini",))
    with pytest.raises(ConfigError, match="--lora-modules: sql: .*none is no folder"):
        require_adapters(AdapterConfig.of({"sql": tmp_path / "none"}), ("mini",))
