"""Pages of libraries that a start has used: only those that are as in their file are unmapped, and come back by use."""

import subprocess
import sys

import pytest

from tandem_engine.base import library_pages
from tandem_engine.base.library_pages import LIBRARIES, SMAPS, clean_ranges, unmap_libraries

ENTRY = """{addresses} {rights} 00000000 fe:00 42{path}
Size:                 16 kB
Rss:                  {rss} kB
Private_Dirty:        {dirty} kB
Anonymous:            {anonymous} kB
Swap:                 {swap} kB
VmFlags: rd ex mr mw me
"""

LIBRARY = "/lib/a.so.1"

USED = """
import re
from pathlib import Path
from tandem_engine.base.library_pages import unmap_libraries
import llvmlite.binding, numpy, torch

def of_files():
    return int(re.search(r"^RssFile:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10

def used():
    a = torch.arange(12.0).reshape(3, 4)
    assert (a @ a.T).sum() == numpy.einsum("ij,kj->", a.numpy(), a.numpy())
    assert "main" in str(llvmlite.binding.parse_assembly("define void @main() { ret void }"))

used()
before, unmapped = of_files(), unmap_libraries()
print(before, unmapped, of_files())
used()
"""


def entry(
    *,
    path: str = f"    {LIBRARY}",
    rights: str = "r-xp",
    rss: int = 8,
    dirty: int = 0,
    anonymous: int = 0,
    swap: int = 0,
) -> str:
    values = {"rights": rights, "rss": rss, "dirty": dirty, "anonymous": anonymous, "swap": swap}
    return ENTRY.format(addresses="1000-5000", path=path, **values)


def without(field: str) -> str:
    return "".join(line for line in entry().splitlines(keepends=True) if not line.startswith(field))


@pytest.mark.parametrize("rights", ["r-xp", "r--p"])
def test_code_and_constants_of_library_are_clean(rights):
    assert [*clean_ranges(entry(rights=rights), [LIBRARY])] == [(0x1000, 0x4000, 8 << 10)]


@pytest.mark.parametrize(
    "other",
    [
        entry(rights="rw-p"),
        entry(anonymous=4),
        entry(swap=4),
        entry(dirty=4),
        without("Anonymous"),
        without("Swap"),
        entry().splitlines(keepends=True)[0],
        entry(path="    /lib/b.so"),
        entry(rss=0),
        entry(path=""),
        entry(path="    /models/a/model.safetensors"),
        entry(path="    [heap]"),
    ],
    ids=[
        "writable",
        "relocated",
        "relocated and swapped out",
        "changed",
        "without a number of changed pages",
        "without a number of swapped pages",
        "without numbers",
        "another library",
        "not resident",
        "no file",
        "weights",
        "heap",
    ],
)
def test_only_mappings_of_the_given_libraries_are_listed(other):
    assert [*clean_ranges(other + entry(), [LIBRARY])] == [(0x1000, 0x4000, 8 << 10)]


@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps")
def test_unmapped_libraries_work_on():
    run = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    before, unmapped, after = map(int, run.stdout.split())
    assert unmapped > 0.6 * before
    assert after < 0.4 * before


def test_libraries_that_may_be_unloaded_are_left(tmp_path, monkeypatch):
    """A file of the same name that no thread has loaded, and one that is loaded and has another name."""
    name, advised = min(LIBRARIES), []
    maps = f"1000-5000 r-xp 00000000 fe:00 42    {tmp_path / name}\n5000-9000 r-xp 00000000 fe:00 43    /lib/ucx.so\n"
    (tmp_path / "maps").write_text(maps)
    (tmp_path / "smaps").write_text(entry(path=f"    {tmp_path / name}") + entry(path="    /lib/ucx.so"))
    monkeypatch.setattr(library_pages, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(library_pages, "SMAPS", tmp_path / "smaps")
    monkeypatch.setattr(library_pages, "advise", lambda *args: advised.append(args))
    assert unmap_libraries() == 0
    assert advised == []
