"""Every relative link of a Markdown page leads to a file, and to a heading of it."""

import re
from pathlib import Path

from tandem_testing.each_case import check_each

ROOT = Path(__file__).parents[3]
SKIPPED = {".venv", ".git", "node_modules", "results"}
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not SKIPPED & set(page.relative_to(ROOT).parts) and not page.relative_to(ROOT).parts[0].startswith(".")
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchor_of(heading: str) -> str:
    """The anchor that GitHub derives from a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return {anchor_of(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_links_of_all_pages_resolve() -> None:
    check_each(PAGES, links_resolve, name=lambda page: str(page.relative_to(ROOT)))


def links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` title\n[good](#a-b-title) [bad](#none) [gone](gone.md)\n")
    assert broken_links(page) == ["#none", "gone.md"]
