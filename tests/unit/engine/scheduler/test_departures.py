"""Which requests migrate from a worker, when, and what draining does to requests that have not begun."""

from dataclasses import dataclass, field

import pytest

from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import SessionRef
from tandem_engine.scheduler.migration import ASK_AGAIN_S, AT_ONCE, FEW_TOKENS
from tandem_testing.quiet_stage import QuietStage
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

PROMPT = range(1, 9)
LONG = 60


@dataclass
class Worker:
    """An engine that could send KV, and the requests that were asked to migrate so far."""

    engine: Engine = field(default_factory=lambda: make_engine(usable_pages=600, max_rows=32))

    def __post_init__(self) -> None:
        self.engine.scheduler.attach(QuietStage())

    def begin(self, *rids: str, max_tokens: int = LONG, **fields: object) -> None:
        for rid in rids:
            self.engine.add(make_message(rid, PROMPT, max_tokens=max_tokens, **fields))
        self.engine.step(2)

    def asked(self) -> list[str]:
        """In the order in which they were."""
        outputs = [output for _, delivery in self.engine.deliveries for output in delivery]
        return [output.rid for output in outputs if output.leaving]

    def pass_time(self, seconds: float) -> None:
        self.engine.clock.time += seconds
        self.engine.step()


@pytest.fixture
def worker():
    return Worker()


def test_migration_is_requested_only_while_desired(worker):
    worker.begin("r")
    assert worker.asked() == []
    worker.engine.scheduler.decode_elsewhere(wanted=True)
    worker.engine.step()
    assert worker.asked() == ["r"]
    worker.engine.scheduler.decode_elsewhere(wanted=False)
    worker.pass_time(ASK_AGAIN_S)
    assert worker.asked() == ["r"]


def test_unplaced_migration_continues_and_is_requested_again(worker):
    worker.begin("r")
    worker.engine.scheduler.decode_elsewhere(wanted=True)
    worker.engine.step(3)
    assert worker.asked() == ["r"]
    worker.pass_time(ASK_AGAIN_S)
    assert worker.asked() == ["r", "r"]
    worker.engine.run()
    worker.engine.assert_expected("r")


def test_migrations_are_requested_in_batches_before_any_repeat(worker):
    rids = [f"r{i}" for i in range(AT_ONCE + 3)]
    worker.begin(*rids)
    worker.engine.scheduler.decode_elsewhere(wanted=True)
    worker.engine.step(3)
    assert worker.asked() == rids[:AT_ONCE]
    worker.pass_time(ASK_AGAIN_S)
    assert worker.asked()[AT_ONCE:] == [*rids[AT_ONCE:], *rids[: AT_ONCE - 3]]


def test_finished_migration_allows_the_next_request(worker):
    rids = [f"r{i}" for i in range(AT_ONCE + 1)]
    worker.begin(*rids)
    worker.engine.scheduler.decode_elsewhere(wanted=True)
    worker.engine.step()
    worker.engine.scheduler.abort(rids[0])
    worker.engine.step(2)
    assert worker.asked() == rids


def test_unmigrated_request_fails_retryable_after_timeout(worker):
    worker.begin("early")
    worker.engine.scheduler.decode_elsewhere(wanted=True, within_s=25.0)
    worker.engine.step()
    worker.pass_time(20.0)
    worker.begin("late")
    worker.pass_time(5.0)
    worker.engine.step(2)
    finish = worker.engine.finish("early")
    assert (finish.reason, finish.code, finish.retryable) == (FinishReason.ERROR, "draining", True)
    worker.engine.run()
    worker.engine.assert_expected("late")
    worker.engine.assert_nothing_held()


def test_migration_timeout_restarts_when_desired_again(worker):
    worker.begin("r")
    worker.engine.scheduler.decode_elsewhere(wanted=True, within_s=25.0)
    worker.engine.step()
    worker.pass_time(20.0)
    worker.engine.scheduler.decode_elsewhere(wanted=False)
    worker.pass_time(20.0)
    worker.engine.scheduler.decode_elsewhere(wanted=True, within_s=25.0)
    worker.engine.step()
    worker.pass_time(20.0)
    worker.engine.run()
    worker.engine.assert_expected("r")


def test_drain_does_not_end_running_requests(worker):
    """The worker service does, for all at once, when its time is over."""
    worker.begin("r")
    worker.engine.scheduler.drain()
    worker.pass_time(3600.0)
    worker.engine.run()
    worker.engine.assert_expected("r")


def test_output_that_is_nearly_complete_ends_where_it_is(worker):
    worker.begin("short", max_tokens=FEW_TOKENS + 1)
    worker.begin("long")
    worker.engine.scheduler.decode_elsewhere(wanted=True)
    worker.engine.step()
    assert worker.asked() == ["long"]


def test_conversation_that_is_kept_here_ends_its_turn_here():
    worker = Worker(make_engine(usable_pages=100, session_pages=50))
    worker.begin("turn", session=SessionRef(id="s"))
    worker.engine.scheduler.drain()
    worker.engine.step(3)
    assert worker.asked() == []
    worker.engine.run()
    worker.engine.assert_expected("turn")


def test_engine_without_sender_requests_no_migration():
    engine = make_engine()
    engine.add(make_message("r", PROMPT, max_tokens=LONG))
    engine.step(2)
    engine.scheduler.drain()
    engine.step(3)
    assert [output.leaving for output in engine.received["r"].outputs] == [False] * len(engine.received["r"].outputs)


def test_drain_fails_queued_requests_as_retryable():
    worker = Worker(make_engine(max_running_requests=1))
    worker.begin("begun")
    worker.begin("queued", "queued too")
    worker.engine.scheduler.drain()
    worker.engine.run()
    worker.engine.assert_expected("begun")
    for rid in ("queued", "queued too"):
        finish = worker.engine.finish(rid)
        assert (finish.reason, finish.code, finish.retryable) == (FinishReason.ERROR, "draining", True)
    worker.engine.assert_nothing_held()


def test_draining_worker_keeps_draining_in_a_new_role(worker):
    worker.begin("r")
    worker.engine.scheduler.drain()
    worker.engine.scheduler.decode_elsewhere(wanted=False)
    worker.engine.step()
    assert worker.asked() == ["r"]
