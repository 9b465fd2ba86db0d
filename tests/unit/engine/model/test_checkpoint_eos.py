"""Which ids end a generation."""

import json

import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_testing.checkpoint_files import write_config


@pytest.fixture
def eos(tmp_path):
    def eos_of(*, config=None, generation=None) -> tuple[int, ...]:
        write_config(tmp_path, eos_token_id=config)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return parse_config(open_directory(tmp_path)).eos_token_ids

    return eos_of


def test_eos_is_from_config_if_generation_config_has_none(eos):
    assert eos(config=3) == (3,)
    assert eos(config=[3, 5]) == (3, 5)
    assert eos(config=3, generation={"temperature": 0.6}) == (3,)
    assert eos(config=3, generation={"eos_token_id": None}) == (3,)


def test_generation_config_wins_when_they_conflict(eos):
    assert eos(config=3, generation={"eos_token_id": [7, 4, 7]}) == (7, 4)


def test_no_end_token_at_all_is_allowed(eos):
    assert eos() == ()


@pytest.mark.parametrize("value", [20, -1, 10**30, "2", 1.0, True, [1, None], [[1]], list(range(20)) * 4])
def test_id_outside_the_vocabulary_is_refused(eos, value):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        eos(config=3, generation={"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id"):
        eos(config=value, generation={})


def test_broken_generation_config_is_refused(eos, tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        eos(config=3)
