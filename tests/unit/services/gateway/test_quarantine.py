"""Which requests are quarantined for killing workers, and for how long gateways remember them [poison-quarantined]."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem_engine.messages.requests import AdapterRef, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.common.metrics import MetricFamilies, new_registry
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.dispatch.plan import Choice, RequestPlan
from tandem_services.gateway.dispatch.quarantine import MAX_REMEMBERED, QUARANTINE_S, Quarantine
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_testing.service_clock import ServiceClock


def asked(*, input_ids: tuple[int, ...] = (1, 2, 3), max_tokens: int = 9, seed: int = 4, **shared: Any) -> RequestPlan:
    """A request of one choice."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return RequestPlan(model="any name", choices=(Choice(index=0, input_ids=input_ids, sampling=sampling),), **shared)


@dataclass
class SharedBoard:
    """Digests in memory, as Redis keeps them."""

    held: dict[str, float] = field(default_factory=dict)
    reachable: bool = True

    async def put(self, digest: str, *, ttl_s: float, capacity: int) -> None:
        self._require()
        assert len(self.held) < capacity
        self.held[digest] = ttl_s

    async def digests(self) -> dict[str, float]:
        self._require()
        return dict(self.held)

    def _require(self) -> None:
        if not self.reachable:
            raise RedisUnavailableError("no answer")


@pytest.fixture
def clock() -> ServiceClock:
    return ServiceClock()


@pytest.fixture
def board() -> SharedBoard:
    return SharedBoard()


@pytest.fixture
def make(clock, board):
    def quarantine(*, model: str = "m", salt: bytes = b"salt") -> Quarantine:
        metrics = GatewayMetrics(MetricFamilies(new_registry()), model=model)
        return Quarantine(model=model, clock=clock, metrics=metrics, salt=salt, board=board)

    return quarantine


def convict(quarantine: Quarantine, plan: RequestPlan) -> None:
    quarantine.quarantine(plan, plan.choices[0], about={"request_id": "r"}, workers={"a@1", "b@1"})


def refuses(quarantine: Quarantine, plan: RequestPlan) -> bool:
    try:
        quarantine.check(plan, plan.choices[0])
    except ApiError as error:
        return (error.status, error.reason) == (500, "request_quarantined")
    return False


# Memory


def test_quarantine_matches_request_regardless_of_seed(make):
    quarantine = make()
    assert not refuses(quarantine, asked())
    convict(quarantine, asked())
    assert refuses(quarantine, asked())
    assert refuses(quarantine, asked(seed=77))
    for other in (
        asked(input_ids=(1, 2)),
        asked(max_tokens=8),
        asked(pooling=PoolingParams()),
        asked(adapter=AdapterRef(name="sql", digest=b"a" * 16)),
    ):
        assert not refuses(quarantine, other)


def test_quarantine_ends_after_its_duration(make, clock):
    quarantine = make()
    convict(quarantine, asked())
    clock.advance(QUARANTINE_S - 1)
    assert refuses(quarantine, asked())
    clock.advance(1)
    assert not refuses(quarantine, asked())


async def test_quarantine_of_one_gateway_applies_at_another_after_a_sync(make):
    first, second = make(), make()
    convict(first, asked())
    await first.sync()
    await second.sync()
    assert refuses(second, asked())


async def test_quarantine_without_redis_is_local_and_shared_later(make, board):
    first, second = make(), make()
    board.reachable = False
    convict(first, asked())
    await first.sync()
    assert refuses(first, asked())
    board.reachable = True
    await first.sync()
    await second.sync()
    assert refuses(second, asked())


async def test_cleared_request_is_served_again(make, board):
    first, second = make(), make()
    convict(first, asked())
    await first.sync()
    await second.sync()
    board.held.clear()
    await first.sync()
    await second.sync()
    assert not refuses(first, asked())
    assert not refuses(second, asked())


def test_memory_is_bounded(make):
    quarantine = make()
    asks = [asked(input_ids=(number,)) for number in range(MAX_REMEMBERED + 3)]
    for ask in asks:
        convict(quarantine, ask)
    assert [refuses(quarantine, ask) for ask in asks[:4]] == [False, False, False, True]


async def test_digest_is_of_one_model(make):
    ours, theirs = make(), make(model="n")
    convict(ours, asked())
    await ours.sync()
    await theirs.sync()
    assert not refuses(theirs, asked())


async def test_digest_says_nothing_without_the_salt(make, board):
    ours, theirs = make(), make(salt=b"other")
    convict(ours, asked())
    await ours.sync()
    await theirs.sync()
    assert not refuses(theirs, asked())
