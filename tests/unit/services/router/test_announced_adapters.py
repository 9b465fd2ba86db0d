"""Names of adapters that a model is expected to have, which gateways share through Redis."""

import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import ServedAdapter
from tandem_services.router.deployment import Deployment
from tandem_testing.adapter_board import SharedTexts, gateways_of

MODEL = "mock"


@pytest.fixture
def board() -> SharedTexts:
    return SharedTexts()


@pytest.fixture
def gateway(board):
    return gateways_of(board, model=MODEL)


async def test_other_gateways_have_announced_names(gateway):
    first, later = gateway(), gateway()
    await first.announce(["sql", "law"])
    await later.sync()
    assert later.announced.names == ("law", "sql")
    assert (later.all(), later.reported.all()) == ({}, {})


async def test_newest_announcement_holds_at_all_gateways(gateway):
    first, second = gateway(), gateway()
    await first.announce(["sql"])
    await second.sync()
    await second.announce(["law"])
    await first.sync()
    assert first.announced.names == second.announced.names == ("law",)
    await first.announce([])
    await second.sync()
    assert second.announced.names == ()


async def test_wiped_redis_gets_the_announcement_again(gateway, board):
    first, later = gateway(), gateway()
    await first.announce(["sql"])
    board.texts.clear()
    await first.sync()
    await later.sync()
    assert later.announced.names == ("sql",)


async def test_announcement_of_another_deployment_is_replaced(gateway, board):
    foreign, first = gateway(of=Deployment.of(KeyPair.generate())), gateway()
    await foreign.announce(["evil"])
    await first.sync()
    assert first.announced.names == ()
    await first.announce(["sql"])
    later = gateway()
    await later.sync()
    assert later.announced.names == ("sql",)


@pytest.mark.parametrize("text", ["", "x", "0 {}", "é" * 300_000, "\udcff {"])
async def test_damaged_announcement_is_written_again(gateway, board, text):
    first = gateway()
    await first.announce(["sql"])
    [place] = board.texts
    board.texts[place] = text
    await first.sync()
    later = gateway()
    await later.sync()
    assert later.announced.names == ("sql",)


async def test_other_models_have_their_own_announcements(gateway):
    first, other = gateway(), gateway(model="other")
    await first.announce(["sql"])
    await other.sync()
    assert other.announced.names == ()


async def test_announced_and_registered_names_are_apart(gateway):
    first, later = gateway(), gateway()
    await first.announce(["sql"])
    await first.register(ServedAdapter(name="sql", digest="1" * 32, rank=4, root="r"), source="folder")
    await later.sync()
    assert (list(later.all()), later.announced.names) == (["sql"], ("sql",))
