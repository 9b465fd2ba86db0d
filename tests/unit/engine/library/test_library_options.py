"""Options of an engine by the names and the aliases that their flags have."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.hub import Hub
from tandem_engine.library.llm import config_from_options
from tandem_engine.library.model_source import with_folder
from tandem_testing.checkpoint_files import write_checkpoint
from tandem_testing.hub_server import hub_server


def test_vllm_s_and_sglang_s_names_are_options_too() -> None:
    config = config_from_options("m", {"max_model_len": 99, "gpu_memory_utilization": 0.5, "max_num_seqs": 3})
    assert (config.context_length, config.cache.mem_fraction_static) == (99, 0.5)
    assert config.scheduler.max_running_requests == 3
    assert config_from_options("m", {"block_size": 4, "tp_size": 2}).cache.page_size == 4


def test_option_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no engine option 'max_model_length': did you mean max_model_len?"):
        config_from_options("m", {"max_model_length": 99})


def test_model_of_a_hub_becomes_a_folder(tmp_path, monkeypatch):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with hub_server() as server:
        commit = server.add("org/mini", tmp_path).refs["main"]
        hub = Hub(endpoint=server.url, cache=tmp_path / "cache", wait_s=60.0)
        monkeypatch.setattr(Hub, "of_environment", lambda: hub)
        config = with_folder(config_from_options("org/mini", {}), "org/mini", progress=False)
    assert config.model_path == str(tmp_path / "cache" / "models--org--mini" / "snapshots" / commit)


def test_local_model_folder_is_not_resolved(tmp_path):
    for model in (tmp_path, str(tmp_path)):
        assert with_folder(config_from_options(model, {}), model, progress=False).model_path == str(tmp_path)
