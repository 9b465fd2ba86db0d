"""Aborts and deadlines, in every state."""

from weakref import ref

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.scheduler_builders import Engine, make_engine, make_message


def aborted(engine: Engine, rid: str = "r") -> bool:
    finish = engine.finish(rid)
    return finish is not None and finish.reason is FinishReason.ABORT


def test_waiting_request_ends_without_being_computed():
    engine = make_engine(max_running_requests=1)
    engine.add(make_message("running", max_tokens=4))
    engine.add(make_message("waiting", max_tokens=4))
    engine.step()
    engine.scheduler.abort("waiting")
    engine.step()
    assert aborted(engine, "waiting")
    engine.run()
    engine.assert_expected("running")


@pytest.mark.parametrize("overlap", [False, True])
def test_request_between_chunks_ends_and_gives_back_its_pages(overlap):  # [one-home]
    engine = make_engine(chunked_prefill_size=2, enable_overlap=overlap)
    engine.add(make_message(prompt=range(1, 12)))
    engine.step(2)
    engine.scheduler.abort("r")
    engine.run()
    assert aborted(engine)
    assert engine.scheduler.tally.launched <= 3
    engine.assert_nothing_held()


def test_aborted_running_request_keeps_streamed_output():
    engine = make_engine()
    engine.add(make_message(max_tokens=20))
    engine.step(5)
    engine.scheduler.abort("r")
    engine.run()
    assert aborted(engine)
    assert len(engine.output()) == 5


def test_retracted_request_ends_in_the_queue():
    engine = make_engine(force_retract_every=2, max_running_requests=1)
    engine.add(make_message(max_tokens=20))
    while not engine.scheduler.tally.retracted:
        engine.step()
    engine.scheduler.abort("r")
    engine.run()
    assert aborted(engine)
    engine.assert_nothing_held()


def test_unknown_ids_are_ignored():  # [unknown-id-ignored]
    engine = make_engine()
    engine.scheduler.abort("nobody")
    engine.run()
    assert engine.received == {}


def test_abort_after_the_end_changes_nothing():  # [unknown-id-ignored]
    engine = make_engine()
    engine.add(make_message(max_tokens=2))
    engine.run()
    outputs = list(engine.received["r"].outputs)
    engine.scheduler.abort("r")
    engine.step(3)
    assert engine.received["r"].outputs == outputs


def test_ids_are_compared_whole():  # [exact-ids]
    engine = make_engine()
    engine.add(make_message("req-12", max_tokens=3))
    engine.scheduler.abort("req-1")
    engine.run()
    engine.assert_expected("req-12")


def test_computed_pages_of_an_aborted_request_stay_in_the_cache():
    engine = make_engine(page_size=4)
    engine.add(make_message("one", range(1, 13), max_tokens=9))
    engine.step(2)
    engine.scheduler.abort("one")
    engine.run()
    engine.add(make_message("two", [*range(1, 13), 5], max_tokens=2))
    engine.run()
    assert engine.received["two"].outputs[0].cached_tokens == 12


def test_client_that_is_gone_takes_all_its_requests_with_it():
    engine = make_engine()
    for rid, client in [("one", b"gone"), ("two", b"here"), ("three", b"gone")]:
        engine.add(make_message(rid, max_tokens=6), client)
    engine.step(2)
    engine.scheduler.abort_client(b"gone")
    engine.run()
    assert [aborted(engine, rid) for rid in ("one", "two", "three")] == [True, False, True]


def test_request_past_its_deadline_is_aborted():
    engine = make_engine()
    engine.add(make_message("late", max_tokens=50, deadline_s=2.0))
    engine.add(make_message("patient", max_tokens=50))
    engine.step(3)
    engine.clock.time = 2.0
    engine.run()
    assert aborted(engine, "late")
    assert engine.finish("late").code == "deadline_exceeded"
    engine.assert_expected("patient")


def test_deadline_passes_in_the_queue_too():
    engine = make_engine(max_running_requests=1)
    engine.add(make_message("running", max_tokens=50))
    engine.add(make_message("waiting", max_tokens=5, deadline_s=1.0))
    engine.step(2)
    engine.clock.time = 1.5
    engine.step()
    assert aborted(engine, "waiting")


def test_deadline_that_was_met_does_nothing():
    engine = make_engine()
    engine.add(make_message(max_tokens=3, deadline_s=1.0))
    engine.run()
    engine.clock.time = 9.0
    engine.step()
    engine.assert_expected()


def test_all_requests_can_be_aborted_at_once():
    engine = make_engine(max_running_requests=2, chunked_prefill_size=2, enable_overlap=True)
    for number in range(6):
        engine.add(make_message(f"r{number}", range(1, 8), max_tokens=9))
    engine.step(5)
    engine.scheduler.abort_all()
    engine.run(max_steps=4)
    assert all(aborted(engine, f"r{number}") for number in range(6))
    engine.assert_nothing_held()


def test_ended_request_is_not_kept_in_memory_until_its_deadline():
    engine = make_engine()
    engine.add(make_message("done", max_tokens=2, deadline_s=600.0))
    request = ref(engine.scheduler.queues.requests[RequestId("done")])
    engine.run()
    engine.add(make_message("next", max_tokens=2))
    engine.run()
    assert request() is None
