"""Options of an engine by the names and the aliases that their flags have."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.library.llm import config_from_options


def test_vllm_s_and_sglang_s_names_are_options_too() -> None:
    config = config_from_options("m", {"max_model_len": 99, "gpu_memory_utilization": 0.5, "max_num_seqs": 3})
    assert (config.context_length, config.cache.mem_fraction_static) == (99, 0.5)
    assert config.scheduler.max_running_requests == 3
    assert config_from_options("m", {"block_size": 4, "tp_size": 2}).cache.page_size == 4


def test_an_option_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no engine option 'max_model_length': did you mean max_model_len?"):
        config_from_options("m", {"max_model_length": 99})
