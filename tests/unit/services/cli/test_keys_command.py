"""`tandem keys create --file`: what it writes is what a gateway reads."""

import json
import stat

import pytest

from tandem_services.cli.main import main
from tandem_services.gateway.access.key_watch import read_keys


def create(*argv: str) -> int:
    return main(["keys", "create", *argv])


def test_keys_are_added_to_a_file_that_a_gateway_takes(tmp_path, capsys) -> None:
    """The bare entry, sent to a file as install.md once said, was one that no gateway takes."""
    path = tmp_path / "keys.json"
    assert create("search", "--requests-per-minute", "600", "--file", str(path)) == 0
    assert create("ops", "--admin", "--file", str(path)) == 0
    told = capsys.readouterr()
    keys = {line.split()[2].rstrip(","): line.rpartition(": ")[2] for line in told.err.splitlines()}
    ring = read_keys(path)
    assert told.out == ""
    assert [tenant.name for tenant in ring.tenants] == ["search", "ops"]
    assert {name: ring.find(key).name for name, key in keys.items()} == {"search": "search", "ops": "ops"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_its_entries_when_a_name_is_there_already(tmp_path, capsys) -> None:
    path = tmp_path / "keys.json"
    assert create("search", "--file", str(path)) == 0
    path.chmod(0o640)
    before = path.read_bytes()
    assert create("search", "--file", str(path)) == 2
    assert "two entries have the name search" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert create("other", "--file", str(path)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("content", "sentence"), [("{}", "--file keys.json"), ("no json", "--file keys.json: not valid JSON")]
)
def test_a_file_that_is_no_key_file_is_left_alone(content, sentence, tmp_path, capsys) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    assert create("search", "--file", str(path)) == 2
    assert sentence in capsys.readouterr().err
    assert path.read_text() == content


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys) -> None:
    assert create("search", "--file", str(tmp_path / "no" / "keys.json")) == 2
    assert f"--file {tmp_path}/no/keys.json: No such file or directory" in capsys.readouterr().err


def test_an_entry_goes_to_standard_output_without_a_file(capsys) -> None:
    assert create("search", "--concurrency", "4", "--model", "a", "--model", "b") == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["concurrency"], entry["models"]) == ("search", 4, ["a", "b"])


def test_a_name_that_no_gateway_takes_is_wrong_usage(capsys) -> None:
    assert create("two words") == 2
    assert "no gateway would take this entry" in capsys.readouterr().err
