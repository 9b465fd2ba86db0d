"""Adapters of a running engine: names, slots, and when their memory is free."""

from dataclasses import replace

import pytest

from tandem_engine.base.errors import AdapterMissingError, BusyError, CheckpointError, ConfigError
from tandem_engine.config.adapters import MAX_ADAPTERS
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import FREE, AdapterTable
from tandem_engine.model.adapters.weights import AdapterWeights


def digest(number: int) -> bytes:
    return bytes([number] * 16)


def loaded(name: str, number: int) -> LoadedAdapters:
    """An adapter with the content `number`."""
    return LoadedAdapters(
        names={name: AdapterRef(name=name, digest=digest(number))},
        weights=(AdapterWeights(digest=digest(number), rank=1, sites={}),),
        served=(ServedAdapter(name=name, digest=digest(number).hex(), rank=1, root=name),),
        folders={digest(number): name},
    )


@pytest.fixture
def table() -> AdapterTable:
    """With the adapter `a` of content 1, and room for two more."""
    return AdapterTable.of(loaded("a", 1), limit=3)


def held(table: AdapterTable) -> list[bytes]:
    return [weights.digest for weights in table.weights if weights is not FREE]


def test_added_adapter_has_a_slot_of_its_own(table):
    table.add(loaded("b", 2), replaces=False)
    assert [adapter.name for adapter in table.served] == ["a", "b"]
    assert table.slots == {digest(1): 0, digest(2): 1}
    assert held(table) == [digest(1), digest(2)]


def test_equal_content_is_held_once_until_its_last_name(table):
    table.add(loaded("b", 1), replaces=False)
    assert held(table) == [digest(1)]
    table.remove("a")
    assert not table.closed
    table.remove("b")
    assert table.closed == {digest(1)}


def test_equal_content_from_another_folder_is_known_there(table):
    moved = replace(loaded("a", 1), folders={digest(1): "moved"})
    table.add(moved, replaces=False)
    assert table.folder_of(digest(1)) == "moved"


def test_added_again_after_it_has_left_is_in_memory(table):
    table.make_way(digest(1))
    table.add(loaded("a", 1), replaces=False)
    table.sweep([], launched=1, settled=1)
    assert table.resident == (digest(1),)
    table.make_way(digest(1))
    table.sweep([], launched=1, settled=1)
    assert (table.resident, table.served[0].name) == ((), "a")
    table.add(loaded("a", 1), replaces=False)
    assert (table.resident, table.closed) == ((digest(1),), set())


def test_closed_adapter_stays_for_its_requests_and_steps(table):
    table.remove("a")
    table.sweep([digest(1)], launched=5, settled=4)
    table.sweep([], launched=6, settled=5)
    assert (held(table), table.closed) == ([digest(1)], {digest(1)})  # step 6 may read it
    table.sweep([], launched=7, settled=6)
    assert (held(table), table.closed, table.slots) == ([], set(), {})
    table.add(loaded("c", 3), replaces=False)
    assert table.slots == {digest(3): 0}


def test_replaced_adapter_closes_and_returns_with_its_content(table):
    table.add(loaded("a", 2), replaces=True)
    assert ([adapter.digest for adapter in table.served], table.closed) == ([digest(2).hex()], {digest(1)})
    table.sweep([], launched=1, settled=0)
    table.add(loaded("b", 1), replaces=False)
    table.sweep([], launched=1, settled=1)
    assert (held(table), table.closed) == ([digest(1), digest(2)], set())


def test_full_table_keeps_the_name_of_an_adapter_for_later(table):
    table.add(loaded("b", 2), replaces=False)
    table.add(loaded("c", 3), replaces=False)
    table.add(loaded("d", 4), replaces=False, later=True)
    assert (held(table), table.folder_of(digest(4))) == ([digest(1), digest(2), digest(3)], "d")
    table.add(loaded("d", 5), replaces=True, later=True)  # what it replaces has no memory to free
    assert (len(held(table)), table.folder_of(digest(4)), table.folder_of(digest(5))) == (3, "", "d")
    table.add(loaded("e", 6), replaces=False, idle=[digest(2)])
    table.sweep([digest(1)], launched=0, settled=0)
    assert set(held(table)) == {digest(1), digest(3), digest(6)}


def test_same_content_may_replace_itself(table):
    table.add(loaded("a", 1), replaces=True)
    assert (held(table), table.closed) == ([digest(1)], set())


def test_refused_adapter_changes_nothing(table):
    with pytest.raises(ConfigError, match="'a' is loaded already"):
        table.add(loaded("a", 2), replaces=False)
    with pytest.raises(CheckpointError, match=f"digest {digest(2).hex()} here, not {digest(3).hex()}"):
        table.add(loaded("b", 2), replaces=False, digest=digest(3).hex())
    with pytest.raises(AdapterMissingError, match="no adapter 'b' is loaded"):
        table.remove("b")
    with pytest.raises(ConfigError, match=f"'a' has the digest {digest(1).hex()}, not {digest(2).hex()}"):
        table.remove("a", digest=digest(2).hex())
    table.add(loaded("b", 2), replaces=False)
    table.add(loaded("c", 3), replaces=False)
    with pytest.raises(BusyError, match="3 adapters are loaded, --max-cpu-loras is 3"):
        table.add(loaded("d", 4), replaces=False)
    assert [adapter.name for adapter in table.served] == ["a", "b", "c"]


def test_command_that_is_repeated_changes_nothing(table):
    table.add(loaded("b", 2), replaces=False, digest=digest(2).hex())
    before = table.served
    table.add(loaded("b", 2), replaces=False)
    assert (table.served, table.closed, held(table)) == (before, set(), [digest(1), digest(2)])


def test_replacement_at_the_limit_has_one_more_slot(table):
    table.add(loaded("b", 2), replaces=False)
    table.add(loaded("c", 3), replaces=False)
    table.add(loaded("a", 4), replaces=True)
    used = [digest(1)]
    table.sweep(used, launched=5, settled=5)
    assert held(table) == [digest(1), digest(2), digest(3), digest(4)]
    with pytest.raises(BusyError, match="replaced still has requests"):
        table.add(loaded("b", 5), replaces=True)
    table.sweep([], launched=5, settled=5)
    table.add(loaded("b", 5), replaces=True)
    assert sorted(table.slots) == [digest(number) for number in (2, 3, 4, 5)]
    table.sweep([], launched=5, settled=5)
    assert (sorted(table.slots), table.closed) == ([digest(number) for number in (3, 4, 5)], set())


def test_replacement_that_frees_no_slot_needs_one(table):
    table.add(loaded("b", 1), replaces=False)
    table.add(loaded("c", 2), replaces=False)
    table.add(loaded("d", 3), replaces=False)
    with pytest.raises(BusyError, match="unload one"):
        table.add(loaded("b", 4), replaces=True)


def test_names_of_equal_content_are_bounded_as_well(table):
    for number in range(1, MAX_ADAPTERS):
        table.add(loaded(f"a{number}", 1), replaces=False)
    with pytest.raises(BusyError, match="256 adapters have a name"):
        table.add(loaded("b", 1), replaces=False)
    assert len(table.served) == MAX_ADAPTERS
    table.add(loaded("a1", 2), replaces=True)
