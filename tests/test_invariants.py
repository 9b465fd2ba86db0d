"""docs/invariants.md and the citations of its ids: each is known, each is used, and the tests it names exist."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "invariants.md"
NOT_OURS = {"build", "node_modules", "results", "shared"}
"""Folders that no commit has."""
TEXT = {".md", ".proto", ".py", ".sh", ".toml", ".tpl", ".yaml", ".yml"}
CITING = {".md", ".py"}
ID = r"[a-z]{2,}(?:-[a-z0-9]{2,})+"
CITATION = re.compile(rf"(?<![\w\]<])\[({ID})\](?![\[(>])")
"""`[some-id]` that is no subscript, no link and no token between angle brackets."""
ENTRY = re.compile(rf"^\| `({ID})` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(test_\w+\.py)(?:::(\w+))?`")
OTHER_DOCUMENTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:T\d{1,2}\b|(?:A[23]|B[23]|E[1-9]|E10)(?:\.| #?)\d)",
        r"_t\d{1,2}_\w+\(",
        r"# [A-E]\.\d",
        "RELIABILITY",
        "BEHAVIOUR",
        "TRAPS",
    )
)
"""Numbers and names of documents that are not in the repository. Apart, because each alone is searched fast."""
NOT_A_CITATION = re.compile(r"\bT20\b|\bT4\b|\bT5\b|\bE5\.\d")
"""A rule of ruff, an NVIDIA GPU, two families of models."""
DIFFERS = {
    "prompt-logprobs": "`prompt_logprobs=-1` is always a 400",
    "hostile-keys": "the last one counts",
    "client-leaves-aborts": "closes its side of a connection",
    "connections-bounded": "a further connection closes an idle one",
}
"""Entries that are kept in another way than other servers keep them, and the words of docs/api.md that say so."""


def files() -> Iterator[Path]:
    """Texts of the repository, without what is built or installed in its folders."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith((".", "__")) and name not in NOT_OURS]
        yield from (Path(folder, name) for name in names if Path(name).suffix in TEXT)


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in files() if path not in (PAGE, Path(__file__))}


@pytest.fixture(scope="module")
def cited(texts) -> dict[str, Path]:
    """Ids, and a file that cites each."""
    return {i: path for path, text in texts.items() if path.suffix in CITING for i in CITATION.findall(text)}


@pytest.fixture(scope="module")
def entries() -> dict[str, str]:
    """Ids, and the cell that names what guards each."""
    rows = ENTRY.findall(PAGE.read_text())
    assert len({row[0] for row in rows}) == len(rows)
    return {i: guards for i, _, _, guards in rows}


def test_every_row_of_the_page_is_an_entry(entries):
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(entries) > 100


def test_every_cited_id_is_an_entry(cited, entries):
    assert {i: path for i, path in cited.items() if i not in entries} == {}


def test_every_entry_is_cited(cited, entries):
    assert sorted(entries.keys() - cited.keys()) == []


def test_every_entry_names_tests_that_exist(texts, entries):
    sources = {path.name: text for path, text in texts.items() if path.name.startswith("test_")}
    missing = []
    for i, guards in entries.items():
        named = NAMED.findall(guards)
        assert named, f"{i} names no test"
        missing += [
            (i, file, test)
            for file, test in named
            if file not in sources
            or (test and not re.search(rf"^ *(?:async )?def {test}\(", sources[file], re.MULTILINE))
        ]
    assert missing == []


def test_named_chaos_scenarios_exist(texts, entries):
    known = {int(number) for number in re.findall(r"^\| (\d+) \|", texts[ROOT / "docs" / "chaos.md"], re.MULTILINE)}
    for guards in entries.values():
        assert {int(number) for number in re.findall(r"\d+", guards.partition("[chaos](chaos.md)")[2])} <= known


def test_differences_are_described_in_the_api_docs(texts, entries):
    described = texts[ROOT / "docs" / "api.md"].partition("## Where we differ from OpenAI")[2]
    assert DIFFERS.keys() <= entries.keys()
    assert [words for words in DIFFERS.values() if words not in described] == []


def test_no_document_outside_the_repository_is_cited(texts):
    left = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path, text in texts.items()
        for pattern in OTHER_DOCUMENTS
        for found in pattern.finditer(text)
        if not NOT_A_CITATION.match(text, found.start())
    ]
    assert left == []


@pytest.mark.parametrize(
    "text", ["(T60)", "def test_t60_late_write(", "(RELIABILITY C1)", "# B3.17", "# E5 #68", "# B.4"]
)
def test_citations_of_other_documents_are_found(text):
    assert any(pattern.search(text) for pattern in OTHER_DOCUMENTS)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("freed once [single-release].", ["single-release"]),
        ("# [late-write] [ack-per-grant]", ["late-write", "ack-per-grant"]),
        ("[kv-cache](kv-cache.md), names[first-last], <[fim-prefix]>, [0-9], [a-z]", []),
    ],
)
def test_citations_are_distinct_from_other_brackets(text, ids):
    assert CITATION.findall(text) == ids
