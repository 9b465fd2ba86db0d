"""Builder processes: every kernel of a plan is compiled once, also when others need it or end early."""

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("numba")

from numba.core import registry

from tandem_engine.kernels.cpu import build, kept
from tandem_engine.kernels.cpu.build import BYTES_OF_BUILDER, builders_at_work, place_of_builder, places
from tandem_engine.kernels.cpu.builders import Builders
from tandem_engine.kernels.cpu.target import target
from tandem_engine.kernels.store.keys import KernelKey

TWO_PLACES = 2 * BYTES_OF_BUILDER

KERNELS = """
import os
import time
from pathlib import Path

from numba.core import types

from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.pieces import compiled_callback, compiled_piece, inlined

HERE = Path(__file__).parent


def note(text):
    with (HERE / "compiled").open("a") as file:
        file.write(f"{text}\\n")


@kept
def build(number: int):
    note(number)

    def add(x):
        return x + number

    return compiled_callback(add, types.int64(types.int64))


@compiled_piece
def applied(function, x):
    return function(x) + x


@kept
def build_with_pieces(number: int):
    note(number)

    @inlined
    def add(x):
        return x + number

    @inlined
    def multiply(x):
        return x * number

    def add_both(x):
        return applied(add, x) + applied(multiply, x)

    return compiled_callback(add_both, types.int64(types.int64))


@kept
def build_after_a_kill(number: int):
    if not (HERE / "started").exists():
        (HERE / "started").write_text(str(os.getpid()))
        while True:
            time.sleep(60)
    return build.__wrapped__(number)


@kept
def build_nothing(number: int):
    note("failed")
    raise ArithmeticError("no such kernel")
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """A module with builders, also for processes that are started, and an empty store."""
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    kept.store.cache_clear()
    kept._digest_of.cache_clear()
    yield importlib.import_module("kernels_of_a_test")
    sys.modules.pop("kernels_of_a_test")
    kept.store.cache_clear()
    kept._digest_of.cache_clear()


def compiled_in(folder: Path) -> list[str]:
    return (folder / "compiled").read_text().split()


def call(kernel: kept.Callback, number: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(kernel.address)(number))


def test_kernels_needed_by_two_processes_are_compiled_once(kernels, tmp_path):
    plan = [kernels.build.spec(number) for number in (1, 2, 3)]
    some, others = Builders(plan, TWO_PLACES), Builders(plan[::-1], TWO_PLACES)
    try:
        assert some.start()
        assert others.start()
        assert others.wait_for_all() == ()
        assert some.wait_for_all() == ()
    finally:
        some.close()
        others.close()
    assert sorted(compiled_in(tmp_path)) == ["1", "2", "3"]
    kernel = kernels.build(2)
    assert (kernel.stored, call(kernel, 40)) == (True, 42)
    assert not Builders(plan, TWO_PLACES).start(), "nothing is missing"


def test_reproducible_builds_of_one_plan_give_equal_files(kernels, tmp_path, monkeypatch):
    """Two builders share a plan differently each time, and symbols have numbers of their process. Those of a piece that
    gets a piece have its name."""
    plan, files = [kernels.build_with_pieces.spec(number) for number in (1, 2, 3)], []
    for name in ("some", "others"):
        monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / name))
        kept.store.cache_clear()
        builders = Builders(plan, TWO_PLACES, reproducible=True)
        try:
            assert builders.start()
            assert builders.wait_for_all() == ()
        finally:
            builders.close()
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.kernel")})
    assert len(files[0]) == 3
    assert files[0] == files[1]
    assert compiled_in(tmp_path) == ["1", "2", "3"] * 2
    assert call(kernels.build_with_pieces(3), 10) == 10 + 3 + 10 + 10 * 3 + 10


def test_builders_target_cpu_level_and_process_its_own_cpu(kernels):
    """The environment of a program that has njit functions of its own stays as it was."""
    before = registry.cpu_target.target_context.codegen().magic_tuple()
    builders = Builders([kernels.build.spec(1)], BYTES_OF_BUILDER)
    try:
        builders.start()
        assert builders.wait_for_all() == ()
    finally:
        builders.close()
    kernels.build(2)
    keys = [kernels.build.keys(kernels.build.spec(number)) for number in (1, 2)]
    assert kept.store().has(keys[0][0])
    assert kept.store().has(keys[1][-1])
    assert (keys[0][0].target, before[1] in keys[1][-1].target) == (target().name, True)
    assert registry.cpu_target.target_context.codegen().magic_tuple() == before


def test_kernel_of_a_killed_builder_is_compiled_by_the_next_one(kernels, tmp_path):
    plan = [kernels.build_after_a_kill.spec(5), kernels.build.spec(6)]
    builders = Builders(plan, BYTES_OF_BUILDER)
    try:
        builders.start()
        while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
            time.sleep(0.01)
        os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)
        assert builders.wait_for_all() == ()
    finally:
        builders.close()
    assert sorted(compiled_in(tmp_path)) == ["5", "6"]


def test_kernel_that_no_builder_can_compile_is_left_to_its_user(kernels, tmp_path, caplog):
    spec = kernels.build_nothing.spec(1)
    builders = Builders([spec], BYTES_OF_BUILDER)
    try:
        builders.start()
        assert builders.wait_for_all() == (spec,)
        assert "builders of kernels have ended early" in caplog.text
        with kept.expecting(builders), pytest.raises(ArithmeticError, match="no such kernel"):
            kernels.build_nothing(1)
    finally:
        builders.close()
    assert compiled_in(tmp_path) == ["failed", "failed"], "by the builder, and here"


class Promised:
    """Builders under the control of a test."""

    def __init__(self, *, later: bool) -> None:
        self.later = later
        self.waited: list[str] = []

    def wait(self, keys: tuple[KernelKey, ...]) -> None:
        self.waited.append(keys[0].spec.name)

    def comes_later(self, keys: tuple[KernelKey, ...]) -> bool:
        del keys
        return self.later


def test_process_waits_for_builders_before_it_compiles(kernels, tmp_path):
    promised = Promised(later=False)
    with kept.expecting(promised):
        assert call(kernels.build(7), 1) == 8
        assert call(kernels.build(7), 1) == 8
    assert promised.waited == ["build(number=7)"]


def test_late_kernel_is_used_once_it_is_in_a_file(kernels, monkeypatch):
    monkeypatch.setattr(kept, "LOOK_S", 0.0)
    promised = Promised(later=True)
    with kept.expecting(promised):
        late = kept.LateKernel(kernels.build, 9)
        assert late.get() is None
        promised.later = False
        assert late.get() is None, "its builders have ended without it: a process that serves does not compile"
        assert promised.waited == []
        kernels.build(9)
        found = late.get()
        assert found is not None
        assert call(found, 1) == 10
        assert late.get() is found


def test_late_kernel_without_builder_compiles_on_use(kernels):
    late = kept.LateKernel(kernels.build, 11)
    assert call(late.get(), 1) == 12


@pytest.mark.parametrize(("memory", "cores", "count"), [(0, 8, 1), (TWO_PLACES, 8, 2), (1 << 40, 3, 3)])
def test_builders_are_bounded_by_memory_and_cores(monkeypatch, memory, cores, count):
    monkeypatch.setattr(build, "allowed_cpus", lambda: frozenset(range(cores)))
    assert places(memory) == count


def test_place_of_a_kernel_builder_is_free_when_its_process_ends(kernels):
    store = kept.store()
    assert not builders_at_work(store)
    with place_of_builder(store, 1) as mine:
        assert mine
        assert builders_at_work(store)
        with place_of_builder(store, 1) as another:
            assert not another
    assert not builders_at_work(store)


def test_kernel_outside_of_the_plan_is_not_waited_for(kernels, tmp_path):
    """The wait would never end: the place that another builder holds never becomes free here."""
    builders = Builders([kernels.build.spec(1)], TWO_PLACES)
    with place_of_builder(kept.store(), 1):
        builders.wait(kernels.build.keys(kernels.build.spec(2)))
    assert not (tmp_path / "compiled").exists()


def test_no_builder_starts_where_its_kernels_could_not_be_kept(kernels, tmp_path):
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels").chmod(0o777)
    builders = Builders([kernels.build.spec(1)], BYTES_OF_BUILDER)
    assert not builders.start()
    assert call(kernels.build(1), 1) == 2, "it is in the memory of this process alone"
    assert compiled_in(tmp_path) == ["1"]
