"""Steps that are queued on streams and replayed from graphs give what transformers gives, token for token.

The device is a twin on the CPU that knows the rules of one: it raises where the host would wait for it, where device
and host memory meet, and where two streams touch the same memory with nothing between (`tandem_testing.device_twin`).
Its graphs are tapes of operations that are run again on the same memory. So what is tested here is everything about a
GPU but its kernels.
"""

import pytest

from tandem_testing.exactness import run_paths_of
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint
from tandem_testing.twin_platform import TwinPlatform, load_for_twin

PATHS = [
    "whole prompts, no overlap",
    "chunked by 7, overlap",
    "prefix-cached",
    "mixed, staggered",
    "mixed, staggered, no graphs",
    "retracted (forced)",
    "edited: mixed, staggered",
    "edited: retracted (forced)",
    "swapped (forced)",
    "host cache, write_back",
    "n-gram drafts",
    "n-gram drafts, edited",
    "drafts by the model itself",
    "drafts by itself, edited",
    "every fifth step raises",
    "choices that share a prompt",
    "page size 1",
    "disaggregated, layer by layer",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_for_twin(write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model")))


def test_every_way_to_compute_a_token_on_streams_gives_the_same(model):
    platforms: list[TwinPlatform] = []

    def platform() -> TwinPlatform:
        platforms.append(TwinPlatform())
        return platforms[-1]

    results = run_paths_of(model, PATHS, platform=platform, every=2)
    assert {result.path: result.difference for result in results} == dict.fromkeys(PATHS)
    replays = [platform.replays for platform in platforms]
    assert replays[PATHS.index("mixed, staggered, no graphs")] == 0
    assert sum(count > 0 for count in replays) == len(replays) - 1
