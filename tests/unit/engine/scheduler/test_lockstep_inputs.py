"""How inputs reach a scheduler that is alone, and one of several ranks."""

from collections.abc import Sequence

import pytest

from tandem_engine.base.errors import RankLostError
from tandem_engine.messages.control import AbortRequests, Drain
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import FirstFailure, SingleRank
from tandem_engine.parallel.inputs import Add, Input, Stop
from tandem_engine.scheduler.lockstep import AgreedInputs, DirectInputs
from tandem_testing.scheduler_builders import Engine, ManualClock, make_engine, make_message


class Silence:
    """An `Agreement` whose other ranks have ended."""

    def agree(self, *, now: float, inputs: Sequence[Input]) -> None:
        raise RankLostError("Connection closed by peer")


def agreed(engine: Engine, **options: object) -> AgreedInputs:
    """Inputs of a group of one: what is agreed on is what was submitted."""
    parts = {"agreement": Agreement(SingleRank()), "local_clock": ManualClock(), "rank": 0, "failure": FirstFailure()}
    return AgreedInputs(scheduler=engine.scheduler, clock=engine.clock, **{**parts, **options})


def test_direct_inputs_apply_immediately():
    engine = make_engine()
    inputs = DirectInputs(scheduler=engine.scheduler)
    inputs.submit(Add(message=make_message("a"), client=b"me"))
    assert not engine.scheduler.idle
    assert not inputs.pending
    assert inputs.begin_turn()


def test_ranks_apply_inputs_at_iteration_start_in_order():
    engine = make_engine()
    inputs = agreed(engine)
    inputs.submit(Add(message=make_message("a"), client=b""))
    inputs.submit(AbortRequests(rid="a"))
    inputs.submit(Drain())
    inputs.submit(Add(message=make_message("b"), client=b""))
    assert engine.scheduler.idle
    assert inputs.pending
    assert inputs.begin_turn()
    engine.run()
    assert engine.finish("a").reason is FinishReason.ABORT
    assert engine.finish("b").code == "draining"


def test_deadlines_follow_the_agreed_time_of_the_turn():
    engine = make_engine()
    inputs = agreed(engine)
    inputs.submit(Add(message=make_message("a", deadline_s=5.0), client=b""))
    inputs.local_clock.time = 100.0
    assert inputs.begin_turn()
    assert engine.clock.now() == 100.0
    inputs.local_clock.time = 106.0
    engine.step()
    assert engine.finish("a") is None
    inputs.begin_turn()
    engine.run()
    assert engine.finish("a").code == "deadline_exceeded"


def test_stop_is_the_last_turn():
    engine = make_engine()
    inputs = agreed(engine)
    inputs.submit(AbortRequests(rid=None))
    inputs.submit(Stop())
    assert not inputs.begin_turn()
    inputs.stop()  # no rank is left to be notified again


def test_no_turn_follows_a_failure_of_this_rank():
    inputs = agreed(make_engine())
    inputs.failure.record(MemoryError("3 GiB"))
    for attempt in (inputs.begin_turn, inputs.check):
        with pytest.raises(RankLostError, match="a model step raised MemoryError"):
            attempt()
    inputs.stop()


def test_closed_connection_of_another_rank_raises_ranklosterror():
    inputs = agreed(make_engine(), agreement=Silence())
    with pytest.raises(RankLostError, match="Connection closed"):
        inputs.begin_turn()
    with pytest.raises(RankLostError, match="Connection closed"):
        inputs.check()


def test_stop_after_exit_of_other_ranks_only_logs(caplog):
    inputs = agreed(make_engine(), agreement=Silence())
    inputs.stop()
    assert "cannot notify the other ranks to stop" in caplog.text


def test_engine_failure_fails_all_requests_as_retryable():
    engine = make_engine(max_running_requests=1)
    for rid in ("running", "waiting"):
        engine.add(make_message(rid), client=rid.encode())
    engine.step(2)
    engine.scheduler.report_failure(RankLostError("this worker lost a part of its model"))
    for rid in ("running", "waiting"):
        assert (engine.finish(rid).reason, engine.finish(rid).code) == (FinishReason.ERROR, "rank_lost")
        assert engine.finish(rid).retryable
