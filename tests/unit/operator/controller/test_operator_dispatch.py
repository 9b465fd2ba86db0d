"""Workers and pollers: when each service is reconciled, and that the error of one does not affect others."""

import asyncio

import pytest
from prometheus_client import generate_latest

from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.error_reports import ReconcileResult
from tandem_operator.controller.leader_election import NotLeading
from tandem_operator.controller.observations import Observations, ObservationStore
from tandem_operator.controller.pod_poller import PAUSE_S, STARTING_S, PodPollers
from tandem_operator.controller.probes import OperatorMetrics
from tandem_operator.controller.store import SERVICE, ServiceKey, Store
from tandem_operator.controller.workqueue import Dispatcher
from tandem_operator.planning.observed import Canary
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_objects import a_service, an_object
from tandem_testing.metric_text import metric_sum

CHAT, SEARCH = ServiceKey("models", "chat"), ServiceKey("models", "search")


class Outcomes:
    """A reconciler with given outcomes, one per service and reconciliation."""

    def __init__(self, **outcomes):
        self.outcomes = outcomes
        self.looked: asyncio.Queue[str] = asyncio.Queue()

    async def reconcile(self, key):
        outcome = self.outcomes.get(key.name, ReconcileResult())
        self.looked.put_nowait(key.name)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class World:
    def __init__(self, reconciler):
        self.now = 0.0
        self.leads = True
        self.store = Store()
        self.metrics = OperatorMetrics()
        self.reconciler = reconciler
        # Nothing becomes due that is not due at once, however long a test takes.
        self.dispatcher = Dispatcher(self.store, reconciler, self.metrics, lambda: self.leads, clock=lambda: self.now)

    def apply(self, name="chat"):
        seen = a_service(name)
        self.dispatcher.on_event("ModelService", "ADDED", seen.body)
        return seen

    def results(self):
        text = self.metrics_text()
        kinds = ("unchanged", "changed", "failed", "stopped")
        return {
            kind: count
            for kind in kinds
            if (count := metric_sum(text, f'tandem_operator_reconciles_total{{result="{kind}"}}'))
        }

    def metrics_text(self):
        return generate_latest(self.metrics.registry).decode()


async def work(world, count):
    """Reconciles `count` times with one worker."""
    worker = asyncio.create_task(world.dispatcher.work())
    names = [await world.reconciler.looked.get() for _ in range(count)]
    await world.dispatcher.settled()
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    return names


async def test_label_removal_from_object_triggers_reconcile():
    world = World(Outcomes())
    world.dispatcher.ready()
    labels = {"labels": {"tandem.dev/service": "chat"}}
    world.dispatcher.on_event("Service", "ADDED", an_object(SERVICE, "chat-gateway", metadata=labels).body)
    assert await work(world, 1) == ["chat"]
    world.dispatcher.on_event("Service", "MODIFIED", an_object(SERVICE, "chat-gateway").body)
    assert await work(world, 1) == ["chat"]


async def test_no_reconcile_before_the_first_full_list():
    world = World(Outcomes())
    world.apply()
    worker = asyncio.create_task(world.dispatcher.work())
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.reconciler.looked.empty()
    world.dispatcher.ready()
    assert await world.reconciler.looked.get() == "chat"
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


@pytest.mark.parametrize(
    ("outcome", "result"),
    [
        (ReconcileResult(), "unchanged"),
        (ReconcileResult(wrote=True), "changed"),
        (ApiError(409, "Conflict", "modified"), "failed"),
        (RuntimeError("a defect"), "failed"),
        (NotLeading("another one leads"), "stopped"),
    ],
)
async def test_every_outcome_is_counted_and_next_service_reconciled(outcome, result):
    world = World(Outcomes(chat=outcome))
    world.apply("chat")
    world.apply("search")
    world.dispatcher.ready()
    assert await work(world, 2) == ["chat", "search"]
    assert world.results() == ({"unchanged": 2} if result == "unchanged" else {result: 1, "unchanged": 1})


async def test_edit_before_our_status_write_is_reconciled(monkeypatch):
    """Its event came after the answer to our write, which had it already, and was taken for old news: the spec was not
    looked at before the next listing, minutes later.
    """
    monkeypatch.setattr("tandem_operator.controller.workqueue.AFTER_WRITES_S", 0.0)
    edited = a_service(spec={"model": {"path": "/models/other"}}, version=11)
    answer = a_service(spec={"model": {"path": "/models/other"}}, version=12)
    seen = []

    class Writing(Outcomes):
        async def reconcile(self, key):
            seen.append(world.store.service(key).body["spec"]["model"]["path"])
            if len(seen) == 1:
                world.store.put(answer)
                world.dispatcher.on_event("ModelService", "MODIFIED", edited.body)
            self.looked.put_nowait(key.name)
            return ReconcileResult(wrote=len(seen) == 1)

    world = World(Writing())
    world.dispatcher.on_event("ModelService", "ADDED", a_service(version=10).body)
    world.dispatcher.ready()
    await work(world, 2)
    assert seen == ["/models/tandem-mini", "/models/other"]
    assert metric_sum(world.metrics_text(), "tandem_operator_queue_length") == 0


async def test_old_event_queues_no_reconcile():
    world = World(Outcomes())
    seen = world.apply()
    world.dispatcher.ready()
    await work(world, 1)
    world.dispatcher.on_event("ModelService", "MODIFIED", seen.body)
    assert metric_sum(world.metrics_text(), "tandem_operator_queue_length") == 0


async def test_follower_stores_events_and_reconciles_once_it_leads():
    world = World(Outcomes())
    world.leads = False
    world.apply()
    assert metric_sum(world.metrics_text(), "tandem_operator_queue_length") == 0
    assert metric_sum(world.metrics_text(), "tandem_operator_services") == 1
    world.leads = True
    world.dispatcher.begin()
    world.dispatcher.ready()
    assert await work(world, 1) == ["chat"]


class StubPoller:
    """Finds a passed canary, or fails."""

    def __init__(self, error=None):
        self.error = error
        self.turns = 0
        self.closed = False
        self.expecting = False

    async def run_canaries(self, subject, before):
        self.turns += 1
        if self.error is not None:
            raise self.error
        return Observations(canaries={"": Canary(passed=True)})

    async def sync_adapters(self, subject, known):
        return known

    async def poll(self, subject, known):
        return known

    def close(self):
        self.closed = True


class Watch:
    """PodPollers with the clock of the test."""

    def __init__(self, **errors):
        self.now, self.leads = 0.0, True
        self.store, self.board, self.metrics = Store(), ObservationStore(), OperatorMetrics()
        self.made: list[StubPoller] = []
        self.changed: list[ServiceKey] = []
        self.errors = list(errors.values())

        def make(book):
            self.made.append(StubPoller(self.errors.pop(0) if self.errors else None))
            return self.made[-1]

        self.pollers = PodPollers(
            self.store,
            self.board,
            make,
            OperatorSettings(),
            self.metrics,
            leading=lambda: self.leads,
            changed=self.changed.append,
            clock=lambda: self.now,
        )

    async def tick(self, at):
        self.now = at
        self.pollers.tick()
        await asyncio.gather(*self.pollers._polls)


async def test_new_service_has_its_turn_at_once_and_then_each_period():
    watch = Watch()
    watch.store.put(a_service())
    await watch.tick(0.0)
    assert watch.changed == [CHAT]
    await watch.tick(4.9)
    await watch.tick(5.0)
    assert watch.made[0].turns == 2
    # Nothing new was found the second time.
    assert watch.changed == [CHAT]


async def test_polls_are_frequent_while_workers_start():
    """No watch reports when a worker is on standby."""
    watch = Watch()
    watch.store.put(a_service())
    await watch.tick(0.0)
    watch.made[0].expecting = True
    await watch.tick(5.0)
    await watch.tick(5.0 + STARTING_S)
    watch.made[0].expecting = False
    await watch.tick(5.0 + 2 * STARTING_S)
    await watch.tick(5.0 + 3 * STARTING_S)
    assert watch.made[0].turns == 4


async def test_pod_changes_advance_only_the_next_poll():
    watch = Watch()
    watch.store.put(a_service())
    await watch.tick(0.0)
    for _ in range(5):
        watch.pollers.wake(CHAT)
    await watch.tick(PAUSE_S - 0.1)
    await watch.tick(PAUSE_S)
    await watch.tick(PAUSE_S + 0.1)
    assert watch.made[0].turns == 2


@pytest.mark.parametrize("error", [RuntimeError("a defect"), ApiError(500, "", "broken"), NotLeading("no")])
async def test_failed_poll_of_one_service_spares_the_others(error):
    watch = Watch(first=error)
    watch.store.put(a_service("chat"))
    watch.store.put(a_service("search"))
    await watch.tick(0.0)
    assert watch.board.of(CHAT) is None
    assert watch.board.of(SEARCH) is not None
    watch.made[0].error = None
    await watch.tick(5.0)
    assert watch.board.of(CHAT) is not None


async def test_spec_that_cannot_be_read_has_nothing_to_find():
    """Its reconcile, which says so in the status, must not wait for pods."""
    watch = Watch()
    watch.store.put(a_service(spec={"model": {}, "typo": 1}))
    await watch.tick(0.0)
    assert watch.board.of(CHAT) == Observations()
    assert watch.made == []


async def test_lost_leadership_closes_all_pollers():
    watch = Watch()
    watch.store.put(a_service())
    await watch.tick(0.0)
    watch.leads = False
    await watch.tick(5.0)
    assert watch.made[0].closed
    watch.leads = True
    await watch.tick(6.0)
    assert len(watch.made) == 2
