import pytest

from tandem_services.router import redis_functions
from tandem_services.router.redis_functions import CONSTANTS, SCRIPTS, library_source


def test_name_follows_the_content():
    source = library_source()
    assert source.text.startswith(f"#!lua name={source.name}\n")
    assert library_source({**CONSTANTS, "LEASE_MS": 1}).name != source.name
    assert library_source() == source


@pytest.mark.parametrize("changed", SCRIPTS)
def test_name_follows_each_script(monkeypatch, changed):
    source, script = library_source(), redis_functions._script
    monkeypatch.setattr(redis_functions, "_script", lambda name: script(name) + "-- another\n" * (name == changed))
    other = library_source()
    assert other.name != source.name
    assert "-- another" in other.text


def test_every_function_documents_its_arguments_and_answer():  # STYLE 16
    text = library_source().text
    registered = [part.partition("'")[0] for part in text.split("\nregister('")[1:]]
    assert set(registered) == {
        "apply_kv_events",
        "heartbeat",
        "fence",
        "changes",
        "endings",
        "route_and_reserve",
        "release",
        "usage_take",
        "usage_settle",
        "usage_renew",
        "fair_sync",
        "sync_adapters",
        "starting_report",
        "starting_list",
        "cell_summary",
    }
    for name in registered:
        comment = text.partition(f"\nlocal function {name}(")[0].rpartition("\n\n")[2]
        assert f"-- {name}" in comment
        assert "ARGV:" in comment
        assert "Returns" in comment


def test_all_scripts_are_part_of_the_library():
    from importlib.resources import files

    folder = files("tandem_services.router") / "scripts"
    assert {f"{name}.lua" for name in SCRIPTS} == {entry.name for entry in folder.iterdir()}
