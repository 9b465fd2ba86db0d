"""Which requests are quarantined for killing workers, and for how long gateways remember them [poison-quarantined]."""

from dataclasses import dataclass, field

import pytest

from tandem_engine.messages.requests import AdapterRef, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.common.metrics import MetricFamilies, new_registry
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.dispatch.quarantine import MAX_REMEMBERED, QUARANTINE_S, Quarantine
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_testing.service_clock import ServiceClock


@dataclass(frozen=True)
class Ask:
    model: str = "m"
    input_ids: tuple[int, ...] = (1, 2, 3)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=9, seed=4))
    pooling: PoolingParams | None = None
    adapter: AdapterRef | None = None


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
    def quarantine(*, salt: bytes = b"salt") -> Quarantine:
        return Quarantine(
            clock=clock, metrics=GatewayMetrics(MetricFamilies(new_registry()), model="m"), salt=salt, board=board
        )

    return quarantine


def convict(quarantine: Quarantine, ask: Ask) -> None:
    quarantine.quarantine(ask, about={"request_id": "r"}, workers={"a@1", "b@1"})


def refuses(quarantine: Quarantine, ask: Ask) -> bool:
    try:
        quarantine.check(ask)
    except ApiError as error:
        return (error.status, error.reason) == (500, "request_quarantined")
    return False


# Memory


def test_quarantine_matches_request_regardless_of_seed(make):
    quarantine = make()
    assert not refuses(quarantine, Ask())
    convict(quarantine, Ask())
    assert refuses(quarantine, Ask())
    assert refuses(quarantine, Ask(sampling=SamplingParams(max_tokens=9, seed=77)))
    for other in (
        Ask(input_ids=(1, 2)),
        Ask(model="n"),
        Ask(sampling=SamplingParams(max_tokens=8)),
        Ask(pooling=PoolingParams()),
        Ask(adapter=AdapterRef(name="sql", digest=b"a" * 16)),
    ):
        assert not refuses(quarantine, other)


def test_quarantine_ends_after_its_duration(make, clock):
    quarantine = make()
    convict(quarantine, Ask())
    clock.advance(QUARANTINE_S - 1)
    assert refuses(quarantine, Ask())
    clock.advance(1)
    assert not refuses(quarantine, Ask())


async def test_other_gateways_learn_of_it(make):
    first, second = make(), make()
    convict(first, Ask())
    await first.sync()
    await second.sync()
    assert refuses(second, Ask())


async def test_quarantine_without_redis_is_local_and_shared_later(make, board):
    first, second = make(), make()
    board.reachable = False
    convict(first, Ask())
    await first.sync()
    assert refuses(first, Ask())
    board.reachable = True
    await first.sync()
    await second.sync()
    assert refuses(second, Ask())


async def test_cleared_request_is_served_again(make, board):
    first, second = make(), make()
    convict(first, Ask())
    await first.sync()
    await second.sync()
    board.held.clear()
    await first.sync()
    await second.sync()
    assert not refuses(first, Ask())
    assert not refuses(second, Ask())


def test_memory_is_bounded(make):
    quarantine = make()
    asks = [Ask(input_ids=(number,)) for number in range(MAX_REMEMBERED + 3)]
    for ask in asks:
        convict(quarantine, ask)
    assert [refuses(quarantine, ask) for ask in asks[:4]] == [False, False, False, True]


async def test_digest_says_nothing_without_the_salt(make, board):
    ours, theirs = make(), make(salt=b"other")
    convict(ours, Ask())
    await ours.sync()
    await theirs.sync()
    assert not refuses(theirs, Ask())
