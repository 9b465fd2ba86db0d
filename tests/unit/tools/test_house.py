"""tools/house.py: what counts as an import, a circle and a chain."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]

SOURCES = {
    "p": "",
    "p.a": "from p import b\nfrom p.c import thing",
    "p.b": "try:\n    import p.c\nexcept ImportError:\n    pass",
    "p.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a",
    "p.d": "def f():\n    from p import a",
    "q": "import p.a",
}


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools/house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph(house: ModuleType, *, typed: bool) -> dict[str, set[str]]:
    known = {name: house.Module(name, Path(name), ast.parse(text), 1) for name, text in SOURCES.items()}
    found: dict[str, set[str]] = house.import_graph(known, typed=typed)
    return found


def test_imports_at_the_top_are_arrows_between_modules(house: ModuleType) -> None:
    arrows = {name: targets for name, targets in graph(house, typed=False).items() if targets}
    assert arrows == {"p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "q": {"p.a"}}


def test_circles_may_have_type_only_imports(house: ModuleType) -> None:
    assert house.circles(graph(house, typed=False)) == []
    assert house.circles(graph(house, typed=True)) == [{"p.a", "p.b", "p.c"}]


def test_packages_are_within_all_limits(house: ModuleType) -> None:
    known = house.modules()
    assert [row.text() for row in house.rows(known) if row.exceeded()] == []
    assert len(known) > 100


@pytest.mark.parametrize(
    ("value", "limits", "exceeded"),
    [(9, {"at_most": 9}, False), (10, {"at_most": 9}, True), (9, {"at_least": 9}, False), (8, {"at_least": 9}, True)],
)
def test_row_beyond_its_limit_is_exceeded(
    house: ModuleType, value: int, limits: dict[str, int], exceeded: bool
) -> None:
    row = house.Row("lines", value, **limits)
    assert row.exceeded() is exceeded
    assert ("EXCEEDED" in row.text()) is exceeded


def test_small_part_has_one_importer_in_its_folder(house: ModuleType) -> None:
    lines = {"p": 0, "p.a": 79, "p.b": 79, "p.c": 79, "p.d": 80, "q": 10}
    known = {
        name: house.Module(name, Path(name.replace(".", "/")), ast.parse(SOURCES[name]), count)
        for name, count in lines.items()
    }
    # p.a has one importer in another folder, p.c has two, p.d has none.
    assert house.small_parts(known, house.import_graph(known)) == ["p.b"]


def test_chain_ends_at_its_package(house: ModuleType) -> None:
    assert house.longest_chain(graph(house, typed=False), "p") == 3
    assert house.longest_chain(graph(house, typed=False), "q") == 1
