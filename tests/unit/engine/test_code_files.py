"""Compiled code on disk is found again, and is that of the dtypes it is called with."""

import importlib.util

import pytest

numba = pytest.importorskip("numba")

from numba.core.caching import IndexDataCacheFile  # noqa: E402

from tandem_engine.kernels.cpu.jit import compiled  # noqa: E402


@pytest.fixture
def halved(tmp_path, monkeypatch):
    """A function of a file of its own. Each `compiled(halved)` knows as little of others as in another process."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "halved.py"
    source.write_text("def halved(x):\n    return x / 2\n")
    spec = importlib.util.spec_from_file_location("halved", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.halved


def test_code_is_found_by_the_next_process(halved):
    assert compiled(halved)(3.5) == 1.75
    again = compiled(halved)
    assert again(3.5) == 1.75
    assert sum(again.stats.cache_hits.values()) == 1


def test_two_processes_that_compile_for_different_dtypes_at_the_same_time_do_not_mix_their_code(halved, monkeypatch):
    """Both gave their code the same number in one index: floats were then halved by the code for integers."""
    of_integers, of_floats = compiled(halved), compiled(halved)
    save_index, save_data = IndexDataCacheFile._save_index, IndexDataCacheFile._save_data
    late = []

    def the_other_saves_meanwhile(files, overloads):
        """Both have read the index before either has written to it, and the one to write it first writes data last."""
        monkeypatch.setattr(IndexDataCacheFile, "_save_index", save_index)
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", lambda *data: late.append(data))
        assert of_integers(4) == 2.0
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", save_data)
        save_index(files, overloads)

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", the_other_saves_meanwhile)
    assert of_floats(3.5) == 1.75
    assert len(late) == 1
    save_data(*late[0])

    assert [compiled(halved)(number) for number in (3, 3.5)] == [1.5, 1.75]
