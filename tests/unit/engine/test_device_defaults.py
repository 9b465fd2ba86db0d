"""What a GPU changes of the settings that no flag gave."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import OPEN_SETTINGS, EngineConfig, SchedulerConfig, device_defaults, with_device_defaults
from tandem_engine.config.flags import add_engine_flags, engine_config
from tandem_engine.engine.launch import for_its_device

GIB = 1 << 30
CARDS = {"8 GiB": 8 * GIB, "24 GiB": 24 * GIB, "48 GiB": 48 * GIB, "80 GiB": 80 * GIB, "141 GiB": 141 * GIB}


def parsed(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    args = parser.parse_args(flags)
    args.model, args.role = "model", "both"
    return engine_config(args)


def settings_of(config: EngineConfig) -> dict[str, int]:
    return {name: getattr(config.scheduler, name, config.cache.page_size) for name in OPEN_SETTINGS}


def test_cpu_keeps_the_defaults_of_the_configuration():
    config = parsed()
    assert (config.scheduler, config.cache.page_size) == (SchedulerConfig(), 16)
    assert with_device_defaults(config, 141 * GIB) == for_its_device(config) == config


def test_library_configurations_are_left_as_they_are():
    config = EngineConfig(model_path="model", device="cuda")
    assert with_device_defaults(config, 141 * GIB) == config


@pytest.mark.parametrize("memory", CARDS.values(), ids=CARDS)
def test_every_open_setting_is_the_card_s(memory):
    found = with_device_defaults(parsed("--device", "cuda"), memory)
    assert settings_of(found) == {name: getattr(device_defaults(memory), name) for name in OPEN_SETTINGS}
    assert found.default_context == device_defaults(memory).default_context
    assert found.scheduler.prefill_budget(decodes=1) == found.scheduler.mixed_prefill_tokens
    assert found.scheduler.prefill_budget(decodes=0) == found.scheduler.max_prefill_tokens
    assert all(f"{value}" in str(device_defaults(memory)) for value in settings_of(found).values())


def test_larger_cards_have_no_smaller_defaults():
    rows = [settings_of(with_device_defaults(parsed("--device", "cuda"), memory)) for memory in CARDS.values()]
    for name in OPEN_SETTINGS:
        values = [row[name] for row in rows]
        assert values == sorted(values), name


@pytest.mark.parametrize("memory", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("name", OPEN_SETTINGS)
def test_given_flag_keeps_its_value_and_other_defaults_follow_the_gpu(name, memory):
    flag = f"--{name.replace('_', '-')}"
    found = settings_of(with_device_defaults(parsed("--device", "cuda:1", flag, "48"), memory))
    others = {other: getattr(device_defaults(memory), other) for other in OPEN_SETTINGS}
    assert found == others | {name: 48}


@pytest.mark.parametrize("tokens", [2, 100, 4096])
def test_bound_on_the_step_bounds_the_rows(tokens):
    config = parsed("--device", "cuda", "--max-running-requests", "1", "--max-tokens-per-step", str(tokens))
    found = with_device_defaults(replace(config, left_open=OPEN_SETTINGS), 141 * GIB)
    assert 1 <= found.scheduler.max_running_requests < tokens
    assert found.scheduler.prefill_budget(decodes=0) <= tokens


def test_budget_after_decodes_must_not_be_negative():
    with pytest.raises(ConfigError, match="--mixed-prefill-tokens"):
        SchedulerConfig(mixed_prefill_tokens=-1)


def test_page_of_scheduling_lists_the_defaults():
    page = Path("docs/scheduling.md").read_text("utf-8")
    for memory in (8 * GIB, 48 * GIB, 80 * GIB):
        found = device_defaults(memory)
        row = (
            found.page_size,
            found.chunked_prefill_size,
            found.max_prefill_tokens,
            found.mixed_prefill_tokens,
            found.shared_prefill_tokens,
            found.max_running_requests,
            found.default_context,
        )
        assert f"| {' | '.join(map(str, row))} |" in page
