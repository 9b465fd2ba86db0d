"""The index of decisions lists each record once, under its own number."""

import re
from pathlib import Path

RECORDS = Path(__file__).parents[3] / "docs" / "adr"
_ROW = re.compile(r"^\| (\d+) \| \[[^\]]+\]\((\d{4})-([a-z0-9-]+\.md)\) \| \d{4}-\d\d-\d\d \| (\w.*) \|$", re.MULTILINE)


def test_index_lists_every_record_once() -> None:
    rows = _ROW.findall((RECORDS / "README.md").read_text(encoding="utf-8"))
    assert [int(number) for number, *_ in rows] == sorted(int(file) for _, file, *_ in rows)
    listed = [f"{file}-{name}" for _, file, name, _ in rows]
    assert sorted(listed) == sorted(path.name for path in RECORDS.glob("[0-9]*.md"))
    assert len(listed) == len(set(listed))
