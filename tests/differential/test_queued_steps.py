"""Steps that are queued on streams and replayed from graphs give what transformers gives, token for token.

The device is simulated on the CPU with the rules of a GPU: it raises where the host would wait for it, where device
and host memory meet, and where two streams touch the same memory with nothing between
(`tandem_testing.simulated_device`). Its graphs are tapes of operations that are run again on the same memory. So what
is tested here is everything about a GPU but its kernels.
"""

from pathlib import Path

import pytest

from tandem_engine.engine.loaded_model import LoadedModel
from tandem_lab.verify.paths import WITHOUT_GRAPHS
from tandem_testing.exactness import run_paths_of
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head

PATHS = [
    "whole prompts, no overlap",
    "chunked by 7, overlap",
    "mixed, staggered",
    "edited: retracted (forced)",
    "swapped (forced)",
    "drafts by the model itself",
    "EAGLE drafts",
    "every fifth step raises",
    "choices that share a prompt",
    "disaggregated, layer by layer",
]
COMBINED = ["host cache, write_back", "n-gram drafts, edited", "EAGLE drafts, retracted"]
"""Parts of `PATHS` at once; n-gram drafts alone are in `test_drafts_on_streams`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "model")
    write_tiny_head(checkpoint, Path(f"{checkpoint}-eagle"))
    return load_simulated(checkpoint)


def run(model: LoadedModel, paths: list[str]) -> list[SimulatedPlatform]:
    """What the engines of `paths` ran on, which must have given what transformers gives."""
    platforms: list[SimulatedPlatform] = []

    def platform() -> SimulatedPlatform:
        platforms.append(SimulatedPlatform())
        return platforms[-1]

    results = run_paths_of(model, paths, platform=platform, every=2)
    assert {result.path: result.difference for result in results} == dict.fromkeys(paths)
    assert all(platform.turned for platform in platforms), "heads are turned by attention, as on a device"
    return platforms


@pytest.mark.timeout(900)  # a dozen engines, one after the other
def test_every_way_to_compute_a_token_gives_the_same_with_graphs(model):
    platforms = run(model, PATHS)
    assert len(platforms) == len(PATHS) + 1, "two engines hand over"
    assert all(platform.replays for platform in platforms)


@pytest.mark.long("drafts, host memory, edits and retractions are queued one by one")
@pytest.mark.timeout(900)
def test_combined_ways_to_compute_a_token_give_the_same_with_graphs(model):
    assert all(platform.replays for platform in run(model, COMBINED))


def test_steps_without_graphs_are_queued_and_replay_none(model):
    assert [platform.replays for platform in run(model, [WITHOUT_GRAPHS])] == [0]
