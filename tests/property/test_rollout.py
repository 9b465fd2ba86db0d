"""The rollout law, walked through clusters whose pods start late, fail, and whose owners change their minds."""

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_operator.api.model_service import Rollout
from tandem_operator.api.types import ROLES
from tandem_operator.planning.rollout import RevisionSeen, next_step
from tandem_testing.long_tests import examples

STEPS_TO_CONVERGE = 200


@dataclass
class Cluster:
    """Counts of workers; they become ready when `start` says so."""

    rollout: Rollout
    wanted: dict[str, int]
    target: str = "r0"
    desired: dict[str, dict[str, int]] = field(default_factory=dict)
    ready: dict[str, dict[str, int]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)

    def reconcile(self) -> None:
        seen = [
            RevisionSeen(name=name, desired=counts, ready=self.ready[name], canary_passed=name in self.passed)
            for name, counts in self.desired.items()
        ]
        for name, counts in next_step(self.target, self.wanted, seen, self.rollout).desired.items():
            self.desired[name] = dict(counts)
            ready = self.ready.setdefault(name, dict.fromkeys(ROLES, 0))
            for role in ROLES:
                ready[role] = min(ready[role], counts.get(role, 0))

    def start(self, name: str, role: str) -> None:
        if self.ready[name][role] < self.desired[name].get(role, 0):
            self.ready[name][role] += 1
        if all(self.ready[name][each] >= min(1, self.wanted[each]) for each in ROLES):
            self.passed.add(name)

    def start_all(self) -> None:
        for name in self.desired:
            for role in ROLES:
                self.start(name, role)

    def total(self, role: str) -> int:
        return sum(counts.get(role, 0) for counts in self.desired.values())

    def serving(self, role: str) -> int:
        return sum(counts[role] for counts in self.ready.values())

    def settle(self) -> int:
        """Steps until nothing changes any more."""
        for step in range(STEPS_TO_CONVERGE):
            before = (repr(self.desired), repr(self.ready))
            self.start_all()
            self.reconcile()
            if (repr(self.desired), repr(self.ready)) == before:
                return step
        raise AssertionError(f"no end: {self.desired}")


def only(cluster: Cluster) -> dict[str, dict[str, int]]:
    return {name: counts for name, counts in cluster.desired.items() if any(counts.values())}


rollouts = (
    st.tuples(st.integers(0, 3), st.integers(0, 3))
    .filter(any)
    .map(lambda pair: Rollout(max_surge=pair[0], max_unavailable=pair[1]))
)
counts = st.fixed_dictionaries({role: st.integers(1, 6) for role in ROLES})
events = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 3), st.sampled_from(ROLES)),
        st.tuples(st.just("fail"), st.integers(0, 3), st.sampled_from(ROLES)),
        st.tuples(st.just("target"), st.integers(0, 3), st.just("")),
        st.tuples(st.just("step"), st.just(0), st.just("")),
    ),
    max_size=40,
)


@settings(max_examples=examples(100), deadline=None)
@given(rollouts, counts, events, counts)
def test_rollout_converges_after_any_events(rollout, first, happened, last):
    cluster = Cluster(rollout, dict(first))
    cluster.reconcile()
    for what, number, role in happened:
        name = f"r{number}"
        if what == "target":
            cluster.target = name
        elif what == "step":
            cluster.reconcile()
        elif name in cluster.desired and what == "start":
            cluster.start(name, role)
        elif name in cluster.desired:
            cluster.ready[name][role] = max(0, cluster.ready[name][role] - 1)
    cluster.wanted = dict(last)
    cluster.settle()
    assert only(cluster) == {cluster.target: last}


@settings(max_examples=examples(100), deadline=None)
@given(rollouts, counts, st.lists(st.tuples(st.integers(0, 1), st.sampled_from(ROLES)), max_size=60))
def test_worker_counts_stay_within_surge_and_unavailability_while_pods_start(rollout, wanted, starts):
    cluster = Cluster(rollout, dict(wanted))
    cluster.reconcile()
    for _ in range(10):
        cluster.start_all()
    cluster.target = "r1"
    for number, role in starts:
        cluster.reconcile()
        for each in ROLES:
            assert cluster.total(each) <= wanted[each] + rollout.max_surge
            assert cluster.serving(each) >= wanted[each] - rollout.max_unavailable
        if f"r{number}" in cluster.desired:
            cluster.start(f"r{number}", role)


@settings(max_examples=examples(50), deadline=None)
@given(rollouts, counts)
def test_nothing_moves_before_the_canary_but_the_first_pair(rollout, wanted):
    cluster = Cluster(rollout, dict(wanted))
    cluster.reconcile()
    cluster.start_all()
    cluster.target = "r1"
    for _ in range(20):
        cluster.reconcile()
    for role in ROLES:
        assert cluster.desired["r1"][role] <= 1
        given_up = 0 if rollout.max_surge else 1
        assert cluster.desired["r0"][role] == wanted[role] - given_up


@settings(max_examples=examples(50), deadline=None)
@given(rollouts.filter(lambda rollout: rollout.max_surge > 0), counts)
def test_last_old_pair_is_removed_together(rollout, wanted):
    cluster = Cluster(rollout, dict(wanted))
    cluster.reconcile()
    cluster.start_all()
    cluster.target = "r1"
    for _ in range(STEPS_TO_CONVERGE):
        cluster.reconcile()
        left = [cluster.desired["r0"][role] for role in ROLES]
        assert all(left) or not any(left)
        cluster.start_all()
    assert not any(left)


@settings(max_examples=examples(50), deadline=None)
@given(rollouts, counts, st.lists(counts, max_size=4), st.integers(0, 8))
def test_paused_rollout_scales_without_new_revision(rollout, wanted, changes, steps_before):
    """Whenever it is paused: before the first new worker, or with both revisions serving."""
    cluster = Cluster(rollout, dict(wanted))
    cluster.settle()
    cluster.target = "r1"
    for _ in range(steps_before):
        cluster.reconcile()
        cluster.start_all()
    rolled = {name: any(counts.values()) for name, counts in cluster.desired.items()}
    cluster.rollout = msgspec.structs.replace(rollout, paused=True)
    for change in changes:
        cluster.wanted = dict(change)
        cluster.settle()
        assert {role: cluster.total(role) for role in ROLES} == change
        if not rolled.get("r1"):
            assert not any(cluster.desired["r1"].values())
    cluster.rollout = rollout
    cluster.settle()
    assert only(cluster) == {"r1": cluster.wanted}
