"""Which changes of a status are worth an event."""

import msgspec

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import condition
from tandem_operator.controller.events import ServiceEvent, events_for_transition


def status(*conditions, revision=""):
    return ModelServiceStatus(conditions=list(conditions), revision=revision)


READY = condition("Ready", True, "CanaryPassed", "a request went through")
UNREADY = condition("Ready", False, "Starting", "0 of 1 workers are ready")


def test_unchanged_status_emits_no_event():
    assert events_for_transition(status(READY), status(READY)) == []
    assert events_for_transition(status(UNREADY), status(condition("Ready", False, "Starting", "1 of 2"))) == []


def test_ready_transitions_become_events():
    assert events_for_transition(status(UNREADY), status(READY)) == [
        ServiceEvent("Normal", "CanaryPassed", "Ready is True: a request went through")
    ]
    assert events_for_transition(status(READY), status(UNREADY)) == [
        ServiceEvent("Warning", "Starting", "Ready is False: 0 of 1 workers are ready")
    ]


def test_initial_state_becomes_an_event_only_if_bad():
    assert events_for_transition(status(), status(UNREADY, condition("Valid", True, "SpecAccepted"))) == []
    (reported,) = events_for_transition(status(), status(condition("Valid", False, "InvalidSpec", "spec.prefill: …")))
    assert (reported.kind, reported.reason) == ("Warning", "InvalidSpec")


def test_end_of_degraded_emits_a_normal_event():
    bad, good = condition("Degraded", True, "PodsFailing", "worker: OOM"), condition("Degraded", False, "AllWell")
    assert [reported.kind for reported in events_for_transition(status(good), status(bad))] == ["Warning"]
    assert [reported.kind for reported in events_for_transition(status(bad), status(good))] == ["Normal"]


def test_changed_failure_reason_becomes_an_event():
    """A second mistake in a spec had no event, for the service was degraded already."""
    first, second = condition("Degraded", True, "PodsFailing"), condition("Degraded", True, "ApplyRefused")
    assert [reported.reason for reported in events_for_transition(status(first), status(second))] == ["ApplyRefused"]
    later = msgspec.structs.replace(first, observed_generation=2)
    assert [reported.reason for reported in events_for_transition(status(first), status(later))] == ["PodsFailing"]
    assert events_for_transition(status(first), status(first)) == []


def test_new_revision_becomes_an_event_but_not_the_first():
    assert events_for_transition(status(), status(revision="a1")) == []
    assert events_for_transition(status(revision="a1"), status(revision="b2")) == [
        ServiceEvent("Normal", "RollingOut", "revision a1 is replaced by b2")
    ]


def test_arguments_become_an_event_when_they_are_refused():
    """That they are checked is none: a rollout with them would have two."""
    unknown = condition("ArgumentsAccepted", None, "NotChecked")
    good, bad = (
        condition("ArgumentsAccepted", True, "Accepted"),
        condition("ArgumentsAccepted", False, "ArgumentRefused"),
    )
    assert events_for_transition(status(unknown), status(good)) == []
    assert events_for_transition(status(good), status(unknown)) == []
    for before in (unknown, good):
        (event,) = events_for_transition(status(before), status(bad))
        assert (event.kind, event.reason) == ("Warning", "ArgumentRefused")
    assert events_for_transition(status(bad), status(unknown)) == []
