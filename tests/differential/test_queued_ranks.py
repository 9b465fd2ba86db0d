"""Several ranks whose steps are queued and replayed from graphs, collectives among them, against transformers."""

import pytest

from tandem_testing.exactness import SHARED, run_paths_of
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.simulated_ranks import NAMESPACE, simulated_ranks
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

RANKS = 2


@pytest.mark.timeout(300)
def test_ranks_replay_collectives_and_match_transformers(tmp_path):
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path)
    platforms: list[SimulatedPlatform] = []

    def platform() -> SimulatedPlatform:
        platforms.append(SimulatedPlatform())
        return platforms[-1]

    ranks = simulated_ranks(checkpoint, RANKS, platform)
    results = run_paths_of(load_simulated(checkpoint), [SHARED], ranks={("sender", RANKS): ranks}, every=2)
    assert [result.difference for result in results] == [None]
    assert len(platforms) == RANKS
    first, second = platforms
    assert first.replays == second.replays > 0
    for each in platforms:
        captured = [[func.name() for func, *_ in tape.operations] for tape in each.capturer.tapes]
        assert all(f"{NAMESPACE}::all_reduce" in names for names in captured)
        # Of logits, which graphs of prompts do not have.
        assert [f"{NAMESPACE}::all_gather" in names for names in captured] == [True] * 3 + [False] * 2
