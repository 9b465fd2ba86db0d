"""tools/words.py: which words of which texts it lists."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def words() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("words", ROOT / "tools/words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["words"]


def found(words: ModuleType, path: Path, text: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    return [match.word for match in words.matches(path)]


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("A worker is told anew.", ["told", "anew"]),
        ("the worker who asks, and the user who asks", ["who"]),
        ("apart from what can be told apart", []),
        ("tokens are normalised", ["normalised"]),
        ("[serve](adr/0031-lent-prefixes-move.md) a prefix, as adr/0031-lent-prefixes-move.md says", []),
        ("[lent](routing.md)", ["lent"]),
        ("lent <!-- words: ok -->", []),
        ("a fox who wishes; KEYS: 3 wishes, 4 places; wishes = heads", ["wishes"]),
    ],
)
def test_replaced_words_of_a_text_are_listed(words: ModuleType, tmp_path: Path, text: str, listed: list[str]) -> None:
    assert sorted(found(words, tmp_path / "page.md", text)) == sorted(listed)


def test_strings_of_tests_are_not_read(words: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    source = '"""A mishap."""\nPROMPT = "a stranger"\nlent_total = 0  # for ever\n'
    for folder, listed in (
        ("tests", ["mishap", "lent", "for ever"]),
        ("engine", ["mishap", "stranger", "lent", "for ever"]),
    ):
        (tmp_path / folder).mkdir()
        assert sorted(found(words, tmp_path / folder / "module.py", source)) == sorted(listed)


def test_long_name_of_a_test_is_listed(words: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    short, long = "test_" + "a" * words.MAX_TEST_NAME, "test_" + "b" * (words.MAX_TEST_NAME + 1)
    text = "".join(f"def {name}():\n    pass\n" for name in (short, long))
    assert found(words, tmp_path / "test_page.py", text) == [long]
