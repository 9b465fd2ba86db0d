"""Hook of mkdocs: links of a page to files outside docs/ lead to the repository.

Pages link as they do on a forge, such as `../engine/README.md`. The site has only docs/, so these links get the
repository's address. A target that does not exist is a warning, which ends a strict build.
"""

import logging
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrites the links of one page; mkdocs calls it by this name."""
    folder = (DOCS / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(DOCS) and target.is_file():
            return match[0]
        if not target.exists():
            log.warning("%s: link to %s, which does not exist", page.file.src_uri, match[1])
        kind = "tree" if target.is_dir() else "blob"
        path = PurePosixPath(target.relative_to(ROOT))
        return f"]({config['repo_url'].rstrip('/')}/{kind}/main/{path}{match[2] or ''})"

    return _LINK.sub(replaced, markdown)
