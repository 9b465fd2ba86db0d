"""The one token that opens a port."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.common.tokens import MAX_TOKEN_BYTES, BearerToken


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    return path


@pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", "Bearer   s3cret "])
def test_valid_token_is_accepted(path, header):
    assert BearerToken(path=path).admits(header)


@pytest.mark.parametrize(
    "header",
    [None, "", "s3cret", "Basic s3cret", "Bearer", "Bearer s3cre", "Bearer s3crets", "Bearer s3 cret", "Bearer é"],
)
def test_any_other_authorization_header_is_not_admitted(path, header):
    assert not BearerToken(path=path).admits(header)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", "é".encode(), b"x" * (MAX_TOKEN_BYTES + 1)])
def test_file_without_a_token_is_refused_at_the_start(path, content):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--token-file"):
        BearerToken(path=path)


def test_absent_file_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="--token-file"):
        BearerToken(path=tmp_path / "absent")


def test_token_that_was_exchanged_is_the_only_one(path):
    token = BearerToken(path=path)
    new = path.with_name("new")
    new.write_text("other")
    new.replace(path)
    assert (token.admits("Bearer s3cret"), token.admits("Bearer other")) == (False, True)


def test_missing_or_empty_token_file_rejects_all(path, caplog):
    token = BearerToken(path=path)
    path.unlink()
    assert not token.admits("Bearer s3cret")
    assert "rejecting all requests" in caplog.text
    path.write_text("")
    assert not token.admits("Bearer ")
    path.write_text("s3cret")
    assert token.admits("Bearer s3cret")
