"""`tandem ctl HOST:PORT adapters`."""

from tandem_services.cli.ctl import adapters_table

ONE, TWO, THREE = ("1" * 32, "2" * 32, "3" * 32)


def test_worker_table_has_states_and_reasons_of_failed_loads():
    report = {
        "adapters": [{"name": "sql", "digest": ONE, "rank": 8}, {"name": "chat", "digest": TWO, "rank": 16}],
        "memory": {
            "limit": 2,
            "resident": [ONE],
            "failed": [
                {"name": "chat", "digest": TWO, "reason": "no such folder"},
                {"name": "late", "digest": THREE, "reason": "r 128"},
            ],
        },
    }
    rows = [line.split(maxsplit=4) for line in adapters_table(report).splitlines()[1:]]
    assert rows == [
        ["chat", TWO, "16", "failed", "no such folder"],
        ["sql", ONE, "8", "in", "memory"],
        ["late", THREE, "-", "failed", "r 128"],
    ]


def test_gateway_table_names_the_workers_that_failed():
    adapter = {"name": "sql", "digest": ONE, "rank": 8, "registered": True, "requested": True, "workers": ["d1"]}
    table = adapters_table({"data": [{**adapter, "failed": {"d2": "no such folder"}}]})
    assert table.splitlines()[1].split() == ["sql", ONE, "8", "registered", "d1", "d2:", "no", "such", "folder"]


def test_worker_without_adapters_has_a_sentence():
    assert adapters_table({"adapters": [], "memory": {"limit": 2, "resident": [], "failed": []}}) == "no adapters"


def test_worker_that_loads_its_model_is_not_without_adapters():
    assert "not ready" in adapters_table({"adapters": [], "memory": None})


def test_reason_moves_no_cursor_of_a_terminal():
    failed = {"name": "sql", "digest": ONE, "reason": "a\x1b[2J\nb"}
    adapter = {"name": "sql", "digest": ONE, "rank": 8, "registered": True, "requested": True, "workers": ["d1"]}
    of_worker = {"adapters": [], "memory": {"limit": 2, "resident": [], "failed": [failed]}}
    of_gateway = {"data": [{**adapter, "failed": {"d2": failed["reason"]}}]}
    for report in (of_worker, of_gateway):
        [_, row] = adapters_table(report).split("\n")
        assert row.endswith(r"a\x1b[2J\x0ab")


def test_gateway_of_a_former_release_reports_no_failures():
    adapter = {"name": "sql", "digest": ONE, "rank": 8, "registered": True, "requested": True, "workers": ["d1"]}
    assert adapters_table({"data": [adapter]}).splitlines()[1].split() == ["sql", ONE, "8", "registered", "d1"]
