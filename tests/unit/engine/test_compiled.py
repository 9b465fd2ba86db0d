from types import ModuleType

import pytest

from tandem_engine.compiled import revision_of


@pytest.fixture
def module(tmp_path) -> ModuleType:
    module = ModuleType("piece")
    module.__file__ = str(tmp_path / "piece.py")
    (tmp_path / "piece.py").write_text("x = 1\n")
    return module


def test_a_revision_changes_with_source_and_constant(module, tmp_path):
    before = revision_of(module, constant=32)
    assert before == revision_of(module, constant=32) > 0
    assert before != revision_of(module, constant=16)
    (tmp_path / "piece.py").write_text("x = 2\n")
    assert before != revision_of(module, constant=32)
