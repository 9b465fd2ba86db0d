"""Layers with a window in pages of their own: the tokens of transformers, whatever their former pages hold."""

from collections.abc import Sequence

import pytest
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.memory.group_pools import GroupPools
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.window_pages import WindowPages
from tandem_testing.exactness import CACHED, CHUNKED, CONTINUED, MIXED, RETRACTED, run_paths_of
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PATHS = {
    "gemma3": [CACHED, MIXED, RETRACTED, "page size 1", "drafts by the model itself"],
    "mistral": [CHUNKED, RETRACTED, CONTINUED, "page size 64"],
    "llama4": [CACHED, MIXED, RETRACTED, "page size 1", "drafts by the model itself"],
}
"""Some layers have a window; all have; some have chunks. The exactness matrix has the other paths."""

make_windows = GroupPools.windows.fget


def poison(pool: KvPool, pages: Sequence[int]) -> None:
    pool.data[list(pages)] = torch.nan


def poisoned(pools: GroupPools) -> list[WindowPages]:
    """Windows whose pages are no numbers from when they are dropped until they are written again."""
    layered = [
        pool for group, pool in zip(pools.layout.groups, pools.pools, strict=True) if group.spec.reach.span is not None
    ]
    windows = make_windows(pools)
    for window, pool in zip(windows, layered, strict=True):
        window._dropped = lambda pages, pool=pool: DROPPED.append(len(pages)) or poison(pool, pages)
    return windows


DROPPED: list[int] = []


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_windows_that_free_their_pages_change_no_token(name, tmp_path, monkeypatch) -> None:
    DROPPED.clear()
    monkeypatch.setattr(GroupPools, "windows", property(poisoned))
    model = load(EngineConfig(model_path=str(write_tiny_checkpoint(name, tmp_path)), dtype="float32"), progress=False)
    results = run_paths_of(model, PATHS[name], every=3)
    assert {result.path: result.difference for result in results} == dict.fromkeys(PATHS[name])
    assert DROPPED


QUEUED = [CHUNKED, RETRACTED, "drafts by the model itself"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_queued_steps_and_graphs_have_the_pages_of_windows(name, tmp_path) -> None:
    """A graph keeps its tensors: each replay has to load those of every group."""
    platforms: list[SimulatedPlatform] = []

    def platform() -> SimulatedPlatform:
        platforms.append(SimulatedPlatform())
        return platforms[-1]

    results = run_paths_of(load_simulated(write_tiny_checkpoint(name, tmp_path)), QUEUED, platform=platform, every=4)
    assert {result.path: result.difference for result in results} == dict.fromkeys(QUEUED)
    assert all(each.replays for each in platforms)
