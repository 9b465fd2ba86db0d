"""Proofs of what processes of one deployment write."""

import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_services.router.deployment import Deployment, supersedes
from tandem_services.router.keys import Keys

OURS, THEIRS = Deployment(b"o" * 40), Deployment(b"t" * 40)
FIELDS = {"incarnation": "w@1", "role": "decode", "request_endpoint": "tcp://127.0.0.1:1", "number": "1"}


def signed(fields: dict[str, str], by: Deployment = OURS) -> dict[str, str]:
    return {**fields, "proof": by.row_proof(fields)}


def test_row_is_recognized_by_its_proof():
    assert OURS.wrote(signed(FIELDS))
    assert OURS.wrote({**signed(FIELDS), "number": "7"})
    assert not OURS.wrote(FIELDS)
    assert not OURS.wrote(signed(FIELDS, by=THEIRS))


@pytest.mark.parametrize("name", ["incarnation", "role", "request_endpoint", "proof"])
@pytest.mark.parametrize("value", ["", "garbage", "-7", "9" * 400, "\ud800", "w@2"])
def test_changed_field_breaks_the_proof_of_a_row(name, value):
    assert not OURS.wrote({**signed(FIELDS), name: value})


def test_field_more_or_less_breaks_the_proof_of_a_row():
    row = signed(FIELDS)
    assert not OURS.wrote({**row, "more": "x"})
    assert not OURS.wrote({name: value for name, value in row.items() if name != "role"})
    # Where one value ends and the next name begins is part of what is signed.
    assert not OURS.wrote({**signed({"a": "b", "c": "d"}), "a": "bc", "c": "d"})


def test_claim_names_its_incarnation():
    assert OURS.claimant(OURS.claim("w@7")) == "w@7"
    for forged in (THEIRS.claim("w@7"), OURS.claim("w@7").replace("@7", "@8"), "w@7", "", "w@7 ", "x" * 1000):
        assert OURS.claimant(forged) is None


def test_verdict_is_signed_or_the_claim_of_a_newer_incarnation():
    assert OURS.condemner(OURS.verdict("w@7", by="p@1"), "w@7") == "p@1"
    assert OURS.condemner(OURS.claim("w@8"), "w@7") == "w@8"
    for forged in (
        OURS.verdict("w@6", by="p@1"),
        THEIRS.verdict("w@7", by="p@1"),
        THEIRS.claim("w@8"),
        OURS.claim("w@6"),
        OURS.claim("w@7"),
        OURS.claim("x@8"),
        "garbage",
        "",
    ):
        assert OURS.condemner(forged, "w@7") is None, forged


def test_verdict_for_memory_is_signed_and_distinct_from_others():
    verdict = OURS.verdict("w@7", by="w@7", for_memory=True)
    assert OURS.condemner(verdict, "w@7") == "w@7"
    assert OURS.was_for_memory(verdict, "w@7")
    assert not OURS.was_for_memory(verdict, "w@6")
    assert not OURS.was_for_memory(OURS.verdict("w@7", by="w@7"), "w@7")
    assert not OURS.was_for_memory(THEIRS.verdict("w@7", by="w@7", for_memory=True), "w@7")


@pytest.mark.parametrize(
    ("one", "other", "newer"),
    [
        ("w@10", "w@9", True),
        ("w@9", "w@10", False),
        ("w@9", "w@9", False),
        ("x@10", "w@9", False),
        ("w@ten", "w@9", False),
        ("", "w@9", False),
    ],
)
def test_newer_of_two_incarnations_has_the_larger_number(one, other, newer):
    assert supersedes(one, other) is newer


def test_deployments_have_namespaces_and_those_without_keys_none():
    pair = KeyPair.generate()
    namespace = Deployment.of(pair).namespace
    assert namespace == Deployment.of(pair).namespace
    assert namespace not in {"", OURS.namespace}
    assert pair.secret.decode() not in repr(Deployment.of(pair))
    assert Deployment.of(None).namespace == ""
    assert Keys("blue", namespace).prefix == f"tandem:{{blue}}:{namespace}:"
