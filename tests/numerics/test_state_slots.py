"""States of requests in slots that others had before: the tokens of transformers, whatever a slot holds."""

import pytest

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.memory.allocator import ReqToTokenPool
from tandem_engine.memory.state_pool import StatePool
from tandem_testing.exactness import CHUNKED, MIXED, RETRACTED, TWICE, run_paths_of
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

ROWS: list[int] = []


@pytest.fixture
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are no numbers when a request gets them; no step in flight has their row then."""
    ROWS.clear()
    pools: list[StatePool] = []
    make, alloc = StatePool.__init__, ReqToTokenPool.alloc

    def made(pool: StatePool, *args, **options) -> None:
        make(pool, *args, **options)
        pools.append(pool)

    def poisoned(rows: ReqToTokenPool) -> int | None:
        row = alloc(rows)
        if row is not None:
            pools[-1].bytes_view().numpy()[row] = 0xFF
            ROWS.append(row)
        return row

    monkeypatch.setattr(StatePool, "__init__", made)
    monkeypatch.setattr(ReqToTokenPool, "alloc", poisoned)


@pytest.mark.usefixtures("_poison")
def test_slots_of_earlier_requests_change_no_token(tmp_path) -> None:
    checkpoint = write_tiny_checkpoint("qwen3-next", tmp_path)
    model = load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)
    results = run_paths_of(model, [MIXED, RETRACTED], every=3)
    assert {result.path: result.difference for result in results} == dict.fromkeys([MIXED, RETRACTED])
    assert len({*ROWS}) < len(ROWS)


@pytest.mark.slow
@pytest.mark.usefixtures("_poison")
def test_queued_steps_and_graphs_have_the_states_of_rows(tmp_path) -> None:
    """A graph pads its rows, and padding reads and writes a slot of its own."""
    platforms: list[SimulatedPlatform] = []

    def platform() -> SimulatedPlatform:
        platforms.append(SimulatedPlatform())
        return platforms[-1]

    names = [CHUNKED, MIXED, RETRACTED, TWICE]
    model = load_simulated(write_tiny_checkpoint("qwen3.5", tmp_path))
    results = run_paths_of(model, names, platform=platform, every=4)
    assert {result.path: result.difference for result in results} == dict.fromkeys(names)
    assert all(each.replays for each in platforms)
