"""Leader election on a clock of the test's own: which operator leads when, also while the API server fails."""

import pytest

from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.leader_election import Election, ElectionConfig, Leadership, NotLeading


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += seconds


class OneLease:
    """The one Lease, with the only thing about the API server that matters here: a write after another's fails."""

    def __init__(self) -> None:
        self.lease = None
        self.version = 0
        self.away = False

    async def get(self, ref, namespace):
        self._answer()
        return self.lease

    async def create(self, manifest):
        self._answer()
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "leases exists")
        return self._store(manifest)

    async def replace(self, manifest):
        self._answer()
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "modified")
        return self._store(manifest)

    def _answer(self):
        if self.away:
            raise ApiError(0, "ClientConnectorError", "no route to host")

    def _store(self, manifest):
        self.version += 1
        self.lease = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.version)}}
        return self.lease


class Candidate:
    """An operator that takes part, and the calls that it got."""

    def __init__(self, name: str, leases: OneLease, clock: Clock) -> None:
        self.calls: list[str] = []
        self.clock = clock
        config = ElectionConfig(identity=name, namespace="tandem-system")
        self.leadership = Leadership(
            Election(config, clock, lambda: "2026-01-01T00:00:00.000000Z"),
            leases,
            began=lambda: self.calls.append("began"),
            ended=lambda: self.calls.append("ended"),
            clock=clock,
            pause=clock.pause,
        )

    async def turn(self, after_s: float = 0.0) -> bool:
        self.clock.now += after_s
        await self.leadership.turn()
        return self.leadership.leading


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leases():
    return OneLease()


@pytest.fixture
def first(leases, clock):
    return Candidate("first", leases, clock)


@pytest.fixture
def second(leases, clock):
    return Candidate("second", leases, clock)


async def test_first_operator_leads_and_second_waits(first, second, leases):
    assert await first.turn()
    assert not await second.turn()
    for _ in range(20):
        assert await first.turn(after_s=2.0)
        assert not await second.turn()
    assert leases.lease["spec"]["holderIdentity"] == "first"
    assert leases.lease["spec"]["leaseTransitions"] == 0
    assert (first.calls, second.calls) == (["began"], [])


async def test_silent_leader_stops_before_it_is_replaced(first, second, leases):
    await first.turn()
    await second.turn()
    first.clock.now += 9.9
    first.leadership.check()
    first.clock.now += 0.2
    with pytest.raises(NotLeading):
        first.leadership.check()
    assert not await second.turn(after_s=4.8)
    assert await second.turn(after_s=0.2)
    assert leases.lease["spec"]["leaseTransitions"] == 1
    assert not await first.turn()
    assert (first.calls, second.calls) == (["began", "ended"], ["began"])


async def test_leader_without_renewal_stops_acting(first, leases):
    await first.turn()
    leases.away = True
    assert await first.turn(after_s=2.0)
    assert not await first.turn(after_s=8.0)
    assert first.calls == ["began", "ended"]
    leases.away = False
    assert await first.turn(after_s=1.0)
    assert first.calls == ["began", "ended", "began"]


async def test_leader_that_goes_lets_the_other_begin_at_once(first, second):
    await first.turn()
    await second.turn()
    await first.leadership.resign()
    assert first.calls == ["began", "ended"]
    assert await second.turn(after_s=0.1)


async def test_free_lease_goes_to_one_of_two_candidates(first, second, leases):
    """Both read the same record; the slower write is refused and it continues standing by."""
    await first.turn()
    await first.leadership.resign()
    lease = leases.lease
    assert await second.turn()
    read = leases.get

    async def stale(ref, namespace):
        leases.get = read
        return lease

    leases.get = stale
    assert not await first.turn()
    assert leases.lease["spec"]["holderIdentity"] == "second"


async def test_times_in_the_lease_are_never_compared(first, second, leases):
    """A clock that jumps ends no leadership [one-clock]; only silence does, measured by the waiting operator."""
    await first.turn()
    leases.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not await second.turn()
    assert not await second.turn(after_s=14.0)


async def test_lease_with_late_response_counts_from_its_request(first, leases):
    create = leases.create

    async def slow(manifest):
        first.clock.now += 4.0
        return await create(manifest)

    leases.create = slow
    await first.turn()
    first.clock.now += 6.1
    with pytest.raises(NotLeading):
        first.leadership.check()


@pytest.mark.parametrize("times", [{"duration_s": 10.0}, {"retry_s": 10.0}, {"renew_deadline_s": 0.0}])
def test_times_that_cannot_work_are_refused(times):
    with pytest.raises(ValueError, match="lease duration .* must be above the renew deadline"):
        ElectionConfig(identity="a", namespace="b", **times)
