import importlib.util
from pathlib import Path
from types import ModuleType

import numba
import pytest

from tandem_engine.attention import cpu_kernels
from tandem_engine.attention.cpu_queries import cut_queries
from tandem_engine.attention.task_groups import group_tasks, shared_end
from tandem_engine.compiled import compiled, revision_of
from tandem_engine.disaggregation import word_mixing
from tandem_engine.disaggregation.full_words import full_digests
from tandem_engine.disaggregation.sampled_words import sampled_digests


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


def imported(path: Path, **names: object) -> ModuleType:
    """As a new process imports it; `names` are there already."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    spec.loader.exec_module(module)
    return module


def test_code_that_was_kept_follows_the_constants_of_another_file(tmp_path, monkeypatch):
    """It was found again by its own file, and computed with the constants that the other one had had."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "user.py").write_text("def times(x):\n    return x * NUMBER\n")

    def times(number: int):
        (tmp_path / "piece.py").write_text(f"NUMBER = {number}\n")
        piece = imported(tmp_path / "piece.py")
        user = imported(tmp_path / "user.py", NUMBER=piece.NUMBER)
        return compiled(user.times, made_of=[piece])

    def hits(kernel) -> int:
        return sum(kernel.stats.cache_hits.values())

    first, again, changed = times(3), times(3), times(40)
    assert (first(2), hits(first)) == (6, 0)
    assert (again(2), hits(again)) == (6, 1)
    assert (changed(2), hits(changed)) == (80, 0)


@pytest.mark.parametrize(
    ("kernel", "piece"),
    [
        (cut_queries, cpu_kernels),
        (shared_end, cpu_kernels),
        (group_tasks, cpu_kernels),
        (sampled_digests, word_mixing),
        (full_digests, word_mixing),
    ],
)
def test_code_that_is_made_of_another_file_is_kept_with_its_revision(kernel, piece):
    """Digests of pages were kept by their own files alone, and loaded as they were before another file changed."""
    _, revision = kernel._cache._cache_file.source_stamp
    assert revision == revision_of(piece)
