"""What status and events tell of decisions."""

from tandem_operator.scaling.policy import Decision
from tandem_operator.telemetry.autoscaler import event_of, merge_history, new_events


def hold(seconds: int) -> Decision:
    return Decision(role="both", action="hold", before=3, after=3, reason=f"metrics are {seconds} s old")


def scale(after: int, before: int = 1) -> Decision:
    return Decision(role="decode", action="scale", before=before, after=after, reason="3 run and 9 wait")


def test_last_ten_newest_first():
    reported = []
    for number in range(12):
        reported = merge_history(reported, [scale(number)], f"t{number}")
    assert [one.after for one in reported] == list(range(11, 1, -1))
    assert reported[0].time == "t11"


def test_lasting_hold_is_reported_once():
    reported = merge_history([], [hold(16)], "t0")
    assert merge_history(reported, [hold(21)], "t1") == reported
    assert [one.action for one in merge_history(merge_history(reported, [scale(2)], "t2"), [hold(17)], "t3")] == [
        "hold",
        "scale",
        "hold",
    ]


def test_new_reason_to_hold_is_reported():
    reported = merge_history([], [hold(16)], "t0")
    other = Decision(role="both", action="hold", before=3, after=3, reason="no gateway reports its queue")
    assert new_events(reported, [other]) == [other]


def test_scaling_decisions_become_named_events():
    assert event_of(scale(3)) == ("Normal", "ScaledUp", "decode from 1 to 3: 3 run and 9 wait")
    assert event_of(scale(1, before=2))[1] == "ScaledDown"
    assert event_of(hold(16)) == ("Warning", "ScalingHeld", "3 workers stay: metrics are 16 s old")
    flip = Decision(role="both", action="flip", before=0, after=1, reason="to prefill: 9 tokens/s come")
    assert event_of(flip) == ("Normal", "RolesFlipped", "1 workers flip to prefill: 9 tokens/s come")
