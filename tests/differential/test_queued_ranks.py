"""Several ranks whose steps are queued and replayed from graphs, collectives among them, against transformers."""

import pytest

from tandem_testing.exactness import SHARED, run_paths_of
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint
from tandem_testing.twin_platform import TwinPlatform, load_for_twin
from tandem_testing.twin_ranks import NAMESPACE, twin_ranks

RANKS = 2


@pytest.mark.timeout(300)
def test_ranks_replay_collectives_and_match_transformers(tmp_path):
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path)
    platforms: list[TwinPlatform] = []

    def platform() -> TwinPlatform:
        platforms.append(TwinPlatform())
        return platforms[-1]

    ranks = twin_ranks(checkpoint, RANKS, platform)
    results = run_paths_of(load_for_twin(checkpoint), [SHARED], ranks={("sender", RANKS): ranks}, every=2)
    assert [result.difference for result in results] == [None]
    assert len(platforms) == RANKS
    first, second = platforms
    assert first.replays == second.replays > 0
    for each in platforms:
        captured = [[func.name() for func, *_ in tape.operations] for tape in each.capturer.tapes]
        assert all(f"{NAMESPACE}::all_reduce" in names for names in captured)
        # Of logits, which graphs of prompts do not have.
        assert [f"{NAMESPACE}::all_gather" in names for names in captured] == [True] * 3 + [False] * 2
