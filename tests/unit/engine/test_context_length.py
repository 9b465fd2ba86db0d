"""What a context length has to have room for."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, EngineConfig
from tandem_engine.engine.loaded_model import require_loadable
from tandem_services.cli.flags import bundled_model


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (1, "must be at least 2, a token of prompt and one of output, got 1"),
        (5000, "is over the model's 4096 positions"),
    ],
)
def test_context_length_too_small_is_rejected_by_flag_name(asked, sentence) -> None:
    """One of a single token ended in the self-test, by a traceback."""
    config = EngineConfig(model_path=str(bundled_model()), cache=CacheConfig(), context_length=asked)
    with pytest.raises(ConfigError, match=f"--context-length .*{sentence}"):
        require_loadable(config)
