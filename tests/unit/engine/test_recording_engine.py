"""An error in what only records or estimates: an engine computes the same tokens [recording-ends-nothing]."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import tandem_engine
from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import EngineError
from tandem_engine.base.recording import errors, estimating, recording
from tandem_engine.engine.process_loop import Reports
from tandem_engine.messages.kv_events import KvEventBatch
from tandem_testing.raised_anywhere import Fault, name_of, raising, recorded

FOLDER = Path(tandem_engine.__file__).parent
MODEL = FOLDER.parents[1] / "models" / "tandem-mini"
PROMPTS = ("Once upon a time there was a fox. " * 4, "The owl said that the owl said that")
DRAWN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]


def test_error_in_a_record_or_estimate_changes_no_token() -> None:
    with LLM(MODEL, progress=False, dtype="float32", kv_cache_gib=0.02, speculative_algorithm="NGRAM") as llm:
        expected = tokens(llm)
        with recorded(FOLDER) as seen:
            assert tokens(llm) == expected
        isolated = {name.replace(".", ":", 1) for name in errors()}
        functions = [code for code in seen if name_of(code) in isolated]
        assert {"adaptive_length:DraftLengths.choose", "counters:Tally.measure_decode"} <= {*map(name_of, functions)}
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


def test_events_lost_to_an_error_are_sent_again() -> None:
    worker, cache = Worker(), SimpleNamespace(events=[], take_events=lambda: [], snapshot_events=lambda: ["all"])
    engine = SimpleNamespace(
        departure=SimpleNamespace(reason=None),
        memory=SimpleNamespace(cache=cache),
        scheduler=SimpleNamespace(ended=SimpleNamespace(take=list, lost=0)),
        adapter_changes=(0, 0, 0),
        stats=lambda: None,
    )
    reports = Reports(engine=engine, control=worker, watchdog=SimpleNamespace(progressed=str), ready=None)  # type: ignore[arg-type]
    reports._stats_at = float("inf")
    worker.fails, cache.take_events = True, lambda: ["new"]
    reports.publish()
    worker.fails, cache.take_events = False, list
    reports.publish()
    assert [batch.events for batch in worker.batches] == [("all",)]
    reports.publish()
    assert len(worker.batches) == 1


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
