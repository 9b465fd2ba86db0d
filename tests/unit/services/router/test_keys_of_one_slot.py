"""All keys of a deployment are in one slot of a Redis cluster, whatever the names in them are."""

import inspect
from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from tandem_services.router.keys import Keys
from tandem_testing.redis_calls import functions_of, keys_of

NAMES = ("w1", "w1@7", "{other}", "}{", "", "a:b", "ü")


def every_key(keys: Keys, name: str) -> Iterator[str]:
    """Of each property and method that makes one, so that a new one needs no line here."""
    for attribute in (one for one in vars(Keys) if not one.startswith("_")):
        if attribute in {"cluster", "namespace"}:
            continue
        made = getattr(keys, attribute)
        if callable(made):
            made = made(*(name for _ in inspect.signature(made).parameters))
        yield from (made,) if isinstance(made, str) else made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("namespace", ["", "0123abcd"])
def test_all_keys_of_a_cluster_name_have_one_slot(name, namespace):
    made = list(every_key(Keys("default", namespace), name))
    assert len(made) > 15
    assert {key_slot(key.encode()) for key in made} == {key_slot(b"default")}


def test_cluster_names_are_in_slots_of_their_own():
    slots = {key_slot(Keys(f"cluster-{number}").starting.encode()) for number in range(100)}
    assert len(slots) > 90


def test_keys_of_calls_are_read_as_redis_reads_them():
    call = ("FCALL", "tandem_0a1b2c3d_usage_take", 2, "a", "b", "c")
    assert (keys_of(call), functions_of([call])) == (("a", "b"), {"usage_take"})
    with pytest.raises(ValueError, match="EVAL"):
        keys_of(("EVAL", "x"))
