"""Names of adapters that gateways register: kept without Redis, merged by revision, and never taken from others."""

import msgspec
import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import ServedAdapter
from tandem_services.router.deployment import Deployment
from tandem_services.router.registered_adapters import MAX_NAMES, REMOVED_S, RegisteredAdapters
from tandem_testing.adapter_board import SharedTexts

MODEL = "mock"


class Time:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def board() -> SharedTexts:
    return SharedTexts()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def gateway(board, time):
    deployment = Deployment.of(KeyPair.generate())

    def make(*, of: Deployment = deployment, model: str = MODEL) -> RegisteredAdapters:
        return RegisteredAdapters(model=model, deployment=of, board=board, now=time)

    return make


def adapter(name: str, number: int) -> ServedAdapter:
    return ServedAdapter(name=name, digest=f"{number:032x}", rank=4, root=name, size=1000)


def meaning(gateway: RegisteredAdapters) -> dict[str, str]:
    return {name: entry.source for name, entry in gateway.all().items()}


async def test_gateway_started_later_reads_registered_names(gateway):
    first, second = gateway(), gateway()
    await first.register(adapter("sql", 1), source="adapters/sql")
    await second.sync()
    assert meaning(second) == {"sql": "adapters/sql"}
    assert second.find("sql") == first.find("sql")
    assert await second.remove("sql")
    await first.sync()
    assert (meaning(first), first.last_digest("sql"), await first.remove("sql")) == ({}, f"{1:032x}", False)


async def test_names_survive_the_loss_of_redis(gateway, board):
    first, second = gateway(), gateway()
    await first.register(adapter("sql", 1), source="one")
    await second.sync()
    board.texts.clear()
    board.away = True
    await second.register(adapter("chat", 2), source="two")
    assert meaning(second) == {"sql": "one", "chat": "two"}
    board.away = False
    await first.sync()
    await second.sync()
    await first.sync()
    assert meaning(first) == meaning(second) == {"sql": "one", "chat": "two"}


async def test_newest_command_holds_at_all_gateways(gateway, board):
    first, second = gateway(), gateway()
    await first.register(adapter("sql", 1), source="one")
    await second.sync()
    old = dict(board.texts)
    await second.register(adapter("sql", 2), source="two")
    board.texts.update(old)  # an old entry that is written again
    await first.sync()
    await second.sync()
    await first.sync()
    assert meaning(first) == meaning(second) == {"sql": "two"}
    assert board.texts != old


async def test_removed_name_does_not_return_before_it_is_forgotten(gateway, board, time):
    first, late = gateway(), gateway()
    await first.register(adapter("sql", 1), source="one")
    await late.sync()
    await first.remove("sql")
    await late.sync()  # has missed it until now
    assert (meaning(late), len(board.texts)) == ({}, 1)
    time.now += REMOVED_S + 1
    for each in (first, late, first):
        await each.sync()
    assert (board.texts, first.last_digest("sql"), late.last_digest("sql")) == ({}, "", "")


async def test_adapter_entries_signed_by_another_deployment_are_ignored(gateway, board):
    await gateway(of=Deployment.of(KeyPair.generate())).register(adapter("sql", 1), source="evil")
    mine = gateway()
    await mine.sync()
    assert (meaning(mine), board.texts) == ({}, {})
    await mine.register(adapter("sql", 2), source="two")
    [text] = board.texts.values()
    board.texts = {f"{MODEL}:chat": text, f"{MODEL}:sql": text.replace("two", "six"), "other:sql": text}
    fresh = gateway()
    await fresh.sync()
    assert meaning(fresh) == {}
    assert board.texts == {"other:sql": text}
    await mine.sync()
    assert set(board.texts) == {f"{MODEL}:sql", "other:sql"}


async def test_models_of_one_fleet_have_names_of_their_own(gateway):
    one, other = gateway(), gateway(model="another")
    await one.register(adapter("sql", 1), source="one")
    await other.sync()
    assert meaning(other) == {}


async def test_repeated_command_is_no_new_revision(gateway):
    one = gateway()
    await one.register(adapter("sql", 1), source="one")
    before = one.find("sql")
    await one.register(adapter("sql", 1), source="one")
    assert one.find("sql") is before
    await one.register(adapter("sql", 1), source="moved")
    assert one.find("sql").revision == before.revision + 1


async def test_names_are_bounded(gateway, board):
    many, one = gateway(), gateway()
    await many.register(adapter("a0", 1), source="x")
    for number in range(1, MAX_NAMES + 1):
        many._entries[f"a{number}"] = msgspec.structs.replace(many.find("a0"), name=f"a{number}")
    await many.sync()
    await one.sync()
    assert (len(board.texts), len(one.all()), one.full) == (MAX_NAMES + 1, MAX_NAMES, True)


async def test_removed_adapter_names_make_room_for_new_ones(gateway, board, time):
    first, second = gateway(), gateway()
    await first.register(adapter("a0", 1), source="x")
    await first.remove("a0")
    gone = first._entries["a0"]
    for number in range(1, MAX_NAMES):
        first._entries[f"a{number}"] = msgspec.structs.replace(gone, name=f"a{number}", at=gone.at + number)
    await first.sync()
    await second.sync()
    time.now += MAX_NAMES
    assert (first.full, len(first._entries)) == (False, MAX_NAMES)
    await first.register(adapter("b", 2), source="two")
    await second.sync()
    assert meaning(first) == meaning(second) == {"b": "two"}
    assert len(first._entries) == len(second._entries) == MAX_NAMES
    await first.register(adapter("a0", 3), source="three")  # the name that made way, which Redis still has
    await second.sync()
    assert meaning(first) == meaning(second) == {"a0": "three", "b": "two"}


async def test_fields_of_a_later_release_are_kept(gateway, board):
    deployment = Deployment.of(KeyPair.generate())
    one = gateway(of=deployment)
    await one.register(adapter("sql", 1), source="one")
    [text] = board.texts.values()
    content = text.partition(" ")[2].replace("{", '{"later":1,', 1)
    board.texts[f"{MODEL}:sql"] = later = f"{deployment.adapter_proof(MODEL, content)} {content}"
    await one.sync()
    assert board.texts == {f"{MODEL}:sql": later}
    await one.remove("sql")
    assert board.texts != {f"{MODEL}:sql": later}
