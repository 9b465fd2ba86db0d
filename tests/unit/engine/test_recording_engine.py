"""An error in what only records or estimates: an engine computes the same tokens [recording-ends-nothing]."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import tandem_engine
from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import EngineError
from tandem_engine.base.recording import errors, estimating, recording
from tandem_engine.engine import process_loop
from tandem_engine.engine.process_loop import Reports
from tandem_engine.messages.kv_events import KvEventBatch
from tandem_engine.messages.stats import MAX_REPORTED
from tandem_engine.scheduler.finishing import EndedLog
from tandem_testing.raised_anywhere import Fault, name_of, raising, recorded
from tandem_testing.scheduler_builders import ManualClock

FOLDER = Path(tandem_engine.__file__).parent
MODEL = FOLDER.parents[1] / "models" / "tandem-mini"
PROMPTS = ("Once upon a time there was a fox. " * 4, "The owl said that the owl said that")
DRAWN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

NEEDED = {"adaptive_length:DraftLengths.choose", "counters:Tally.measure_decode"}
MAX_RUNS = 20
"""Until both have run. The engine drafts where its measured times say that it pays: on a busy machine not in each."""


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]


def test_error_in_a_record_or_estimate_changes_no_token() -> None:
    with LLM(MODEL, progress=False, dtype="float32", kv_cache_gib=0.02, speculative_algorithm="NGRAM") as llm:
        expected = tokens(llm)
        isolated = {name.replace(".", ":", 1) for name in errors()}
        with recorded(FOLDER) as seen:
            for _ in range(MAX_RUNS):
                assert tokens(llm) == expected
                functions = [code for code in seen if name_of(code) in isolated]
                if {*map(name_of, functions)} >= NEEDED:
                    break
        assert {*map(name_of, functions)} >= NEEDED
        for code in functions:
            before = sum(errors().values())
            with raising(Fault(code=code)) as fault:
                assert tokens(llm) == expected, name_of(code)
            assert sum(errors().values()) - before == fault.fell, name_of(code)


class Worker:
    """What an engine sends to its worker service."""

    def __init__(self) -> None:
        self.batches: list[KvEventBatch] = []
        self.fails = False

    def send(self, message: KvEventBatch) -> bool:
        if self.fails:
            raise ValueError("of the test")
        self.batches.append(message)
        return True


@dataclass(kw_only=True)
class Reported:
    """An engine that does nothing, and its reports."""

    worker: Worker = field(default_factory=Worker)
    snapshots: int = 0
    events: list[str] = field(default_factory=list)
    ended: EndedLog = field(default_factory=lambda: EndedLog(clock=ManualClock()))
    stats: Callable[[], None] = lambda: None
    progress: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine = SimpleNamespace(
            departure=SimpleNamespace(reason=None),
            memory=SimpleNamespace(cache=self),
            scheduler=SimpleNamespace(ended=self.ended),
            adapter_changes=(0, 0, 0),
            stats=self.stats,
        )
        watchdog = SimpleNamespace(progressed=lambda: self.progress.append("turn"))
        self.reports = Reports(engine=engine, control=self.worker, watchdog=watchdog, ready=None)  # type: ignore[arg-type]
        self.reports._stats_at = math.inf

    def take_events(self) -> list[str]:
        taken, self.events = self.events, []
        return taken

    def snapshot_events(self) -> list[str]:
        self.snapshots += 1
        return ["all"]


def test_events_lost_to_an_error_are_sent_again() -> None:
    engine = Reported(events=["new"])
    engine.worker.fails = True
    engine.reports.publish()
    engine.worker.fails = False
    engine.reports.publish()
    assert [batch.events for batch in engine.worker.batches] == [("all",)]
    engine.reports.publish()
    assert len(engine.worker.batches) == 1


def test_error_that_stays_costs_no_replay_in_each_turn() -> None:
    """A replay has the whole cache."""
    engine = Reported(events=["new"])
    engine.worker.fails = True
    for _ in range(5):
        engine.reports.publish()
    assert engine.snapshots == 1
    engine.worker.fails, engine.reports._replay_at = False, 0.0
    engine.events = ["newer"]
    engine.reports.publish()
    assert [batch.events for batch in engine.worker.batches] == [("all",)]


def test_ended_requests_that_cannot_be_reported_count_as_lost() -> None:
    engine = Reported()
    engine.ended._ended = [None] * (MAX_REPORTED + 1)  # type: ignore[list-item]
    engine.worker.fails = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_loop, "EndedRequests", SimpleNamespace)
        engine.reports.publish()
        assert engine.ended.lost == MAX_REPORTED + 1
        engine.ended._ended, engine.worker.fails = [None], False  # type: ignore[list-item]
        engine.reports.publish()
    assert [(len(sent.requests), sent.lost) for sent in engine.worker.batches] == [(1, MAX_REPORTED + 1)]  # type: ignore[attr-defined]
    assert engine.ended.lost == MAX_REPORTED + 1


def test_failed_statistics_are_no_hang() -> None:
    def fail() -> None:
        raise ValueError("of the test")

    engine = Reported(stats=fail)
    engine.reports._stats_at = 0.0
    engine.reports.publish()
    assert engine.progress == ["turn"]


def test_expected_error_passes_a_record() -> None:
    @recording
    def lost() -> None:
        raise EngineError("a rank is lost")

    @estimating(lambda: 3, passing=KeyError)
    def estimate() -> int:
        raise EngineError("not of this kind")

    with pytest.raises(EngineError, match="a rank is lost"):
        lost()
    assert estimate() == 3
