"""The file that gives `tandem ctl` the token of a process of the same user and machine."""

import stat
import tempfile

import pytest

from tandem_engine.base.addresses import Address
from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.tokens import TokenFile, order_token, orders_folder, token_for, token_of


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_token_is_in_a_private_file_while_the_port_serves() -> None:
    file = TokenFile(token="t" * 64, address=Address("127.0.0.1", 9101))
    file.write()
    (path,) = orders_folder().iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert token_of(Address("localhost", 9101)) == token_of(Address("::1", 9101)) == "t" * 64
    file.remove()
    assert token_of(Address("127.0.0.1", 9101)) is None


def test_wildcard_port_token_is_found_by_own_address() -> None:
    TokenFile(token="t" * 64, address=Address("::", 9101), also="fd00::7").write()
    assert token_of(Address("fd00::7", 9101)) == token_of(Address("127.0.0.1", 9101)) == "t" * 64


def test_token_of_this_machine_is_not_sent_to_another() -> None:
    TokenFile(token="t" * 64, address=Address("127.0.0.1", 9101)).write()
    assert token_of(Address("10.0.0.8", 9101)) is None
    assert token_of(Address("worker.example", 9101)) is None


def test_removal_leaves_the_file_of_a_newer_process() -> None:
    older = TokenFile(token="a" * 64, address=Address("127.0.0.1", 9101))
    older.write()
    TokenFile(token="b" * 64, address=Address("127.0.0.1", 9101)).write()
    older.remove()
    assert token_of(Address("127.0.0.1", 9101)) == "b" * 64


def test_folder_that_others_may_read_is_not_used(temporary, caplog) -> None:
    orders_folder().chmod(0o755)
    TokenFile(token="t" * 64, address=Address("127.0.0.1", 9101)).write()
    assert "tandem ctl requires --curve-keys" in caplog.text
    assert token_of(Address("127.0.0.1", 9101)) is None


def test_process_without_keys_draws_a_token_of_its_own() -> None:
    keys = KeyPair.generate()
    assert token_for(keys) == order_token(keys)
    assert token_for(None) != token_for(None)
    assert len(token_for(None)) == 64
