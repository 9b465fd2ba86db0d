"""Contents of a key file, and the errors for other contents."""

import json
from secrets import compare_digest

import pytest

from tandem_services.gateway.access import keys as key_file
from tandem_services.gateway.access.keys import PREFIX, KeyFileError, digest_of, new_key, parse_keys

DIGEST = digest_of("secret")


def parsed(*entries: dict, name: str = "keys.json"):
    return parse_keys({name: json.dumps({"keys": entries}).encode()})


def test_key_is_found_by_its_digest_and_no_other():
    ring = parsed({"name": "a", "sha256": [digest_of("one"), digest_of("two")]}, {"name": "b", "sha256": [DIGEST]})
    found = [ring.find(key) for key in ("one", "two", "secret", "", "Secret", DIGEST, "\ud800")]
    assert [tenant and tenant.name for tenant in found] == ["a", "a", "b", None, None, None, None]


def test_every_digest_is_compared_whatever_the_key(monkeypatch):  # vLLM CVE-2025-59425
    compared = []

    def spy(known: str, given: str) -> bool:
        compared.append(known)
        return compare_digest(known, given)

    monkeypatch.setattr(key_file, "compare_digest", spy)
    ring = parsed(*({"name": f"t{n}", "sha256": [digest_of(str(n))]} for n in range(5)))
    for key in ("0", "4", "none"):
        compared.clear()
        ring.find(key)
        assert len(compared) == 5


def test_key_entry_limits_default_to_unlimited():
    ring = parsed(
        {"name": "a", "sha256": [DIGEST], "requests_per_minute": 5, "tokens_per_minute": 6, "concurrency": 7},
        {"name": "b", "sha256": [digest_of("b")]},
    )
    limits = [tenant.limits for tenant in ring.tenants]
    assert [(one.requests, one.tokens, one.concurrency) for one in limits] == [(5, 6, 7), (0, 0, 0)]


def test_several_files_count_as_one():
    one = json.dumps({"keys": [{"name": "a", "sha256": [DIGEST]}]}).encode()
    two = json.dumps({"keys": [{"name": "b", "sha256": [digest_of("b")]}]}).encode()
    assert [tenant.name for tenant in parse_keys({"1.json": one, "2.json": two}).tenants] == ["a", "b"]
    with pytest.raises(KeyFileError, match="two entries have the name a"):
        parse_keys({"1.json": one, "2.json": one})


GOOD = {"name": "a", "sha256": [DIGEST]}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "no keys"),
        ([{**GOOD, "sha256": []}], "a has no digest"),
        ([{**GOOD, "sha256": [DIGEST, DIGEST]}], "a has a digest twice"),
        ([GOOD, {**GOOD, "name": "b"}], "b has a digest twice, or shares a key"),
        ([{**GOOD, "sha256": ["secret"]}], r"sha256\[0\]"),
        ([{**GOOD, "sha256": [DIGEST.upper()]}], r"sha256\[0\]"),
        ([{**GOOD, "name": ""}], "name"),
        ([{**GOOD, "name": "a b"}], "name"),
        ([{**GOOD, "name": "x" * 65}], "name"),
        ([{**GOOD, "requests_per_minute": 0}], "requests_per_minute"),
        ([{**GOOD, "tokens_per_minute": 1.5}], "tokens_per_minute"),
        ([{**GOOD, "concurrency": "5"}], "concurrency"),
        ([{**GOOD, "weight": 0}], "weight"),
        ([{**GOOD, "request_per_minute": 5}], "request_per_minute"),
        ([{"sha256": [DIGEST]}], "name"),
        (["a"], "keys"),
    ],
)
def test_fault_is_named_with_file_and_field(entries, says):
    with pytest.raises(KeyFileError, match=says) as error:
        parsed(*entries, name="mine.json")
    assert "mine.json" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'{"keys": 5}', b"keys: []", b"null"])
def test_invalid_key_file_is_rejected(content):  # [key-file-refused]
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        parse_keys({"keys.json": content})


def test_bounds_on_size_and_number(monkeypatch):
    with pytest.raises(KeyFileError, match="larger than"):
        parse_keys({"k": b" " * (key_file.MAX_FILE_BYTES + 1)})
    monkeypatch.setattr(key_file, "MAX_KEYS", 2)
    with pytest.raises(KeyFileError, match="the most are 2"):
        parsed(*({"name": f"t{n}", "sha256": [digest_of(str(n))]} for n in range(3)))


def test_new_keys_are_long_random_and_recognisable():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) > 40 for key in keys)
