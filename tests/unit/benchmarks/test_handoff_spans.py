"""The phases of a handoff follow each other, from its start to its end."""

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

with benchmarks_importable():
    from handoff_spans import (
        DESCRIBE,
        DIGEST,
        GIVE_BACK,
        MADE,
        POST,
        PROVED,
        RECEIVED,
        RECORD,
        SEND,
        Mark,
        Marks,
        counts,
        phases,
    )

SENDER = [
    Mark(DESCRIBE, 0.0, 0.1),
    Mark(POST, 0.5, 1.5),
    Mark(GIVE_BACK, 2.0, 2.1),
    Mark(DESCRIBE, 2.1, 2.2),
    Mark(POST, 2.2, 2.4),
    Mark(DIGEST, 2.4, 2.5),
    Mark(GIVE_BACK, 3.0, 3.5),
    Mark(MADE, 4.0, 4.0),
    Mark(RECEIVED, 4.25, 4.5),
    Mark(SEND, 5.0, 5.25),
]
RECEIVER = [Mark(RECORD, 6.0, 6.1), Mark(DIGEST, 6.2, 6.3), Mark(PROVED, 8.0, 8.5)]


def test_phases_of_a_handoff_sum_up_to_the_time_after_its_start():
    found = phases(SENDER, RECEIVER, start=1.0)
    assert found == pytest.approx(
        {
            "prepare": 1e3 * (0.5 + 0.1 + 0.2),
            "write": 2500.0,
            "digests": 500.0,
            "notify": 250.0,
            "record": 1000.0,
            "control": 750.0,
            "verify": 2000.0,
            "install": 500.0,
        }
    )
    assert sum(ms for name, ms in found.items() if name != "prepare") == pytest.approx(7500.0)


def test_phases_before_the_start_take_no_time():
    found = phases(SENDER, RECEIVER, start=4.5)
    assert (found["prepare"], found["write"], found["digests"], found["notify"]) == (0.0, 0.0, 0.0, 0.0)
    assert found["record"] == pytest.approx(750.0)


def test_counts_are_of_pieces_of_one_handoff():
    assert counts(SENDER) == {"WRITEs": 2, "digests": 1, "pushes": 1, "records": 1}


def test_watched_call_is_noted_with_its_end_though_it_raises():
    class Owner:
        def fails(self, number: int) -> None:
            raise ValueError(number)

    marks = Marks()
    marks.watch(Owner, "fails", "odd", only=lambda _, number: number % 2 == 1)
    for number in (1, 2):
        with pytest.raises(ValueError, match=str(number)):
            Owner().fails(number)
    (mark,) = marks.taken()
    assert (mark.label, mark.began <= mark.ended, marks.taken()) == ("odd", True, [])
