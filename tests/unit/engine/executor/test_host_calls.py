"""Python calls of the host for steps on a device, which waits wherever the host takes longer than the step."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from tandem_engine.config import CacheConfig, DisaggConfig, GraphConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_testing.counted_host import StillDevice, python_calls
from tandem_testing.scheduler_builders import make_message
from tandem_testing.simulated_platform import load_simulated
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

BATCH = 256
MAX_CALLS_OF_DECODES = 2000
MAX_CALLS_OF_A_REQUEST = 1250
"""Of a prompt alone with one token of output: admission, its step, and its end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_simulated(write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "model"))


@contextmanager
def engine_of(model, platform: StillDevice):
    config = replace(
        model.config,
        cache=CacheConfig(num_pages=800),
        scheduler=SchedulerConfig(context_length=32, max_running_requests=BATCH),
        disagg=DisaggConfig(transport="none"),
        graphs=GraphConfig(sizes=(BATCH,), prompt_sizes=(16,)),
    )
    with Engine.build(model, config, platform=platform) as engine:
        yield engine


def test_calls_of_a_step_of_256_decodes_are_bounded(model):
    platform, steps = StillDevice(), 4
    with engine_of(model, platform) as engine:
        for number in range(BATCH):
            engine.add(make_message(f"r{number}", [number % 200 + 1] * 2, max_tokens=20))
        while engine.stats().running < BATCH or platform.replays < 2:
            engine.step()
        before = platform.replays
        calls = python_calls(lambda: [engine.step() for _ in range(steps)])
        assert platform.replays - before == steps
    assert calls / steps <= MAX_CALLS_OF_DECODES


def test_calls_of_a_request_of_one_token_are_bounded(model):
    platform = StillDevice()
    with engine_of(model, platform) as engine:
        requests = [make_message(f"r{number}", [number + 1] * 9, max_tokens=1) for number in range(3)]
        engine.generate(requests[:2])
        before = platform.replays
        calls = python_calls(lambda: engine.generate(requests[2:]))
        assert platform.replays - before == 1
    assert calls <= MAX_CALLS_OF_A_REQUEST
