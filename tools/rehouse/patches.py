"""Small edits that no rule of `apply.py` makes: (file, old text, new text), each found once before or done already."""

import re
import shutil
from pathlib import Path

PATCHES: list[tuple[str, str, str]] = []


def edit(path: str, old: str, new: str) -> None:
    PATCHES.append((path, old, new))


def apply(root: Path, here: Path) -> None:
    texts: dict[str, str] = {}
    for path, old, new in PATCHES:
        file = root / path
        if path not in texts:
            if not file.exists():
                print(f"patch: no {path}")
                continue
            texts[path] = file.read_text("utf-8")
        text = texts[path]
        if new and new in text and (old not in text or old in new):
            continue  # done before
        if old not in text:
            if new:
                print(f"patch: {path} has no {old[:70]!r}")
            continue
        texts[path] = text.replace(old, new, 1)
    for path, text in texts.items():
        if (root / path).read_text("utf-8") != text:
            (root / path).write_text(text, "utf-8")
    for name, target in (("importlinter.ini", ".importlinter"),):
        if (here / name).exists():
            shutil.copyfile(here / name, root / target)
