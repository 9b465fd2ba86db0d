"""Adapters of workers' flags, which gateways keep for those that start while there is no worker."""

import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import ServedAdapter
from tandem_services.router.deployment import Deployment
from tandem_services.router.registered_adapters import MAX_REPORTED
from tandem_testing.adapter_board import SharedTexts, gateways_of

MODEL = "mock"


@pytest.fixture
def board() -> SharedTexts:
    return SharedTexts()


@pytest.fixture
def gateway(board):
    return gateways_of(board, model=MODEL)


def adapters(*names: str, number: int = 1) -> dict[str, ServedAdapter]:
    return {name: ServedAdapter(name=name, digest=f"{number:032x}", rank=4, root=name) for name in names}


async def test_gateway_without_workers_knows_reported_names(gateway):
    first, second = gateway(), gateway()
    first.note(adapters("sql", "law"))
    await first.sync()
    await second.sync()
    assert second.reported.all() == adapters("law", "sql")
    assert second.all() == {}, "they are not registered"


async def test_reported_names_follow_the_workers(gateway):
    first = gateway()
    first.note(adapters("sql", "law"))
    await first.sync()
    first.note(adapters("sql", number=2))
    await first.sync()
    later = gateway()
    await later.sync()
    assert later.reported.all() == adapters("sql", number=2)


async def test_gateway_without_workers_changes_no_reported_name(gateway, board):
    first, second = gateway(), gateway()
    first.note(adapters("sql"))
    await first.sync()
    before = dict(board.texts)
    await second.sync()
    assert board.texts == before


async def test_registered_name_is_not_kept_as_reported(gateway):
    first, later = gateway(), gateway()
    await first.register(adapters("sql")["sql"], source="one")
    first.note(adapters("sql", "law"))
    await first.sync()
    await later.sync()
    assert (list(later.all()), list(later.reported.all())) == (["sql"], ["law"])


async def test_unchanged_names_are_not_written_again(gateway, board):
    first = gateway()
    for _ in range(3):
        first.note(adapters("sql"))
        await first.sync()
    assert board.calls == 4


async def test_names_of_another_deployment_or_model_are_not_taken(gateway, board):
    first = gateway()
    first.note(adapters("sql"))
    await first.sync()
    foreign, other = gateway(of=Deployment.of(KeyPair.generate())), gateway(model="other")
    for each in (foreign, other):
        await each.sync()
        assert each.reported.all() == {}
    [(field, text)] = board.texts.items()
    board.texts = {field.replace(MODEL, "other"): text, field.replace("sql", "law"): text, field: "x" * 2000}
    for each in (gateway(), gateway(model="other")):
        await each.sync()
        assert each.reported.all() == {}


async def test_number_of_reported_names_is_bounded(gateway):
    first, later = gateway(), gateway()
    first.note(adapters(*(f"a{number:04d}" for number in range(2 * MAX_REPORTED))))
    await first.sync()
    await later.sync()
    assert len(first.reported.all()) == len(later.reported.all()) == MAX_REPORTED


async def test_forged_names_crowd_out_no_reported_name(gateway, board):
    first, later = gateway(), gateway()
    first.note(adapters("sql"))
    await first.sync()
    [field] = board.texts
    board.texts |= {field.replace("sql", f"a{number:04d}"): "forged" for number in range(2 * MAX_REPORTED)}
    await later.sync()
    assert later.reported.all() == adapters("sql")
    await first.sync()
    assert list(board.texts) == [field], "a gateway that sees workers removes the others"


async def test_gateways_of_two_releases_do_not_overwrite_each_other(gateway, board):
    first, later = gateway(), gateway()
    first.note(adapters("sql"))
    await first.sync()
    [field] = board.texts
    content = board.texts[field].partition(" ")[2].replace("{", '{"further":1,', 1)
    text = f"{first.deployment.reported_adapter_proof(MODEL, content)} {content}"
    board.texts[field] = text
    await first.sync()
    assert board.texts == {field: text}
    await later.sync()
    assert later.reported.all() == adapters("sql")


async def test_reported_name_with_a_long_folder_is_read_again(gateway):
    first, later = gateway(), gateway()
    root = "\x01" * 256
    first.note({"sql": ServedAdapter(name="sql", digest="1" * 32, rank=4, root=root)})
    await first.sync()
    await later.sync()
    assert later.reported.all()["sql"].root == root
