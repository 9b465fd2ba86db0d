"""Warming up keeps the rules of a device and changes no token of a request: on the simulated device."""

from collections.abc import Iterator

import pytest

from tandem_engine.config import CacheConfig, DisaggConfig, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine import Engine, standalone_runs
from tandem_engine.engine.stats import Generation
from tandem_engine.kernels.compiles import CompileCounter
from tandem_testing.scheduler_builders import make_message
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

EDITED = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "bad_words": ((1, 2),)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(autouse=True)
def device_without_kernels(monkeypatch):
    """The simulated device computes by torch, and is warmed up all the same."""
    monkeypatch.setattr(standalone_runs, "by_triton", lambda _: True)
    counter = CompileCounter()
    for module in ("engine", "standalone_runs"):
        monkeypatch.setattr(f"tandem_engine.engine.{module}.COMPILED", counter)


def engines(checkpoint, speculative: SpecConfig) -> Iterator[Engine]:
    """One that is warmed up, and one that is not."""
    config = {
        "cache": CacheConfig(num_pages=40),
        "scheduler": SchedulerConfig(context_length=64, max_running_requests=4),
        "disagg": DisaggConfig(transport="none"),
        "speculative": speculative,
    }
    loaded = load_simulated(checkpoint, **config)
    for warm in (True, False):
        with Engine.build(loaded, loaded.config, platform=SimulatedPlatform()) as engine:
            free = engine.audit().free
            if warm:
                engine.warm_up()
                engine.warm_up()
            assert engine.audit().free == free
            assert engine.audit().problems == ()
            yield engine


def outputs(engine: Engine) -> list[Generation]:
    return engine.generate(
        [
            make_message("plain", range(40), max_tokens=4),
            make_message("edited", range(17), max_tokens=6, **EDITED),
            make_message("sampled", (7,), max_tokens=6, temperature=0.9, top_k=20, seed=3, **EDITED),
        ]
    )


@pytest.mark.parametrize("algorithm", [None, SpecAlgorithm.DRAFT])
def test_warm_engine_gives_the_tokens_of_a_cold_one(checkpoint, algorithm):
    path = "" if algorithm is None else str(checkpoint)
    warm, cold = map(outputs, engines(checkpoint, SpecConfig(algorithm=algorithm, draft_model_path=path)))
    assert [each.token_ids for each in warm] == [each.token_ids for each in cold]
    assert all(each.token_ids for each in warm)
