import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.router.keys import Keys, worker_id_of


def test_all_keys_of_a_cluster_share_one_hash_tag():
    keys = Keys("blue")
    names = [*keys.shared, keys.worker("w"), keys.blocks("w@1"), keys.cursor("w@1")]
    assert all(name.startswith("tandem:{blue}:") for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "}{", "x" * 129, "a\n", "ä", "../x"])
def test_names_that_cannot_be_part_of_a_key_are_refused(name):
    with pytest.raises(ConfigError, match="--cluster"):
        Keys(name)


def test_worker_of_an_incarnation():
    assert worker_id_of("pool-decode-0@123") == "pool-decode-0"
