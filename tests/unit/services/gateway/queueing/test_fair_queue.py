"""Order of the queue, and which request a full queue rejects."""

from tandem_services.gateway.queueing.fair_queue import FairQueue, Waiting
from tandem_services.router.usage_counters import VirtualCounters


def queue_of(seats: int = 100) -> FairQueue[Waiting]:
    return FairQueue(seats=seats, counters=VirtualCounters())


def waiting(tenant: str, *, priority: int = 0, weight: float = 1.0) -> Waiting:
    return Waiting(tenant=tenant, weight=weight, priority=priority, arrived=0.0)


def drained(queue: FairQueue[Waiting], cost: float = 100.0) -> list[str]:
    """Tenants in the order in which they are served; each service costs the same."""
    served = []
    while (head := queue.next(0.0)) is not None:
        queue.counters.charge(head.tenant, cost / head.weight)
        queue.remove(head)
        served.append(head.tenant)
    return served


def fill(queue: FairQueue[Waiting], *tenants: str, **fields: float) -> list[Waiting]:
    entries = [waiting(tenant, **fields) for tenant in tenants]
    for entry in entries:
        assert queue.add(entry) is None
    return entries


def test_one_tenant_is_served_in_order_of_arrival():
    queue = queue_of()
    entries = fill(queue, "a", "a", "a")
    assert queue.next(0.0) is entries[0]
    queue.remove(entries[0])
    assert queue.next(0.0) is entries[1]


def test_tenants_take_turns_however_many_one_has_waiting():
    queue = queue_of()
    fill(queue, *"aaaaaaaa", "b", "b")
    assert drained(queue)[:4] == ["a", "b", "a", "b"]


def test_new_tenant_waits_for_one_request_of_busy_tenant():
    queue = queue_of()
    fill(queue, *"aaaaaaaa")
    for _ in range(3):
        head = queue.next(0.0)
        assert head is not None
        queue.counters.charge("a", 100)
        queue.remove(head)
    fill(queue, "b")
    assert drained(queue)[:2] == ["a", "b"]


def test_shares_follow_weights():
    queue = queue_of()
    fill(queue, *["a"] * 40, weight=3.0)
    fill(queue, *["b"] * 40, weight=1.0)
    first = drained(queue)[:40]
    assert abs(first.count("a") - 30) <= 1


def test_priority_goes_before_fairness():
    queue = queue_of()
    fill(queue, "a", "b")
    fill(queue, "b", priority=1)
    queue.counters.charge("b", 10_000)
    assert drained(queue) == ["b", "a", "b"]


def test_unplaceable_request_is_skipped_for_a_while():
    queue = queue_of()
    first, second = fill(queue, "a", "a")
    first.not_before = 5.0
    assert queue.next(0.0) is second
    assert queue.next(5.0) is first


def test_full_queue_rejects_request_of_tenant_filling_it():
    queue = queue_of(seats=4)
    fill(queue, *"aaaa")
    new_request = waiting("a")
    assert queue.add(new_request) is new_request
    assert len(queue) == 4


def test_full_queue_evicts_last_request_of_largest_tenant():
    queue = queue_of(seats=4)
    entries = fill(queue, "b", *"aaa")
    assert queue.add(waiting("b")) is entries[3]
    assert queue.lengths == {"b": 2, "a": 2}
    # Now both hold as much: the arriving request is rejected.
    for tenant in ("a", "b"):
        new_request = waiting(tenant)
        assert queue.add(new_request) is new_request


def test_more_important_request_takes_a_seat_of_its_own_tenant():
    queue = queue_of(seats=2)
    entries = fill(queue, "a", "a")
    assert queue.add(waiting("a", priority=1)) is entries[1]


def test_removing_twice_is_removing_once():
    queue = queue_of()
    [entry] = fill(queue, "a")
    assert [queue.remove(entry), queue.remove(entry), len(queue)] == [True, False, 0]
    assert queue.counters.backlogged == frozenset()


def test_requests_ahead_are_those_that_are_served_before():
    queue = queue_of()
    own, others = fill(queue, "a", "a"), fill(queue, *"bbb")
    for entry in (*own, *others):
        entry.cost = 100.0
    assert queue.ahead("a", priority=0, cost=100.0) == [*own, *others]
    assert queue.ahead("c", priority=0, cost=100.0) == [own[0], others[0]]
    assert queue.ahead("c", priority=0, cost=50.0) == []
    assert queue.ahead("a", priority=1, cost=100.0) == []


def test_higher_priority_requests_are_ahead_at_any_cost():
    queue = queue_of()
    urgent = fill(queue, "b", priority=2)
    urgent[0].cost = 1e6
    assert queue.ahead("a", priority=1, cost=1.0) == urgent
    assert queue.ahead("a", priority=3, cost=1.0) == []
