"""Pages of libraries that a start has used: only those that are as in their file are unmapped, and come back by use."""

import subprocess
import sys

import pytest

from tandem_engine.base.library_pages import SMAPS, clean_ranges

ENTRY = """{addresses} {rights} 00000000 fe:00 42{path}
Size:                 16 kB
Rss:                  {rss} kB
Private_Dirty:        {dirty} kB
Anonymous:            {anonymous} kB
VmFlags: rd ex mr mw me
"""

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
    *, path: str = "    /lib/a.so.1", rights: str = "r-xp", rss: int = 8, dirty: int = 0, anonymous: int = 0
) -> str:
    return ENTRY.format(addresses="1000-5000", path=path, rights=rights, rss=rss, dirty=dirty, anonymous=anonymous)


@pytest.mark.parametrize("rights", ["r-xp", "r--p"])
def test_code_and_constants_of_library_are_clean(rights):
    assert [*clean_ranges(entry(rights=rights))] == [(0x1000, 0x4000, 8 << 10)]


@pytest.mark.parametrize(
    "other",
    [
        entry(rights="rw-p"),
        entry(anonymous=4),
        entry(dirty=4),
        entry(rss=0),
        entry(path=""),
        entry(path="    /models/a/model.safetensors"),
        entry(path="    [heap]"),
    ],
    ids=["writable", "relocated", "changed", "not resident", "no file", "weights", "heap"],
)
def test_other_mappings_are_left(other):
    assert [*clean_ranges(other + entry())] == [(0x1000, 0x4000, 8 << 10)]


@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps")
def test_unmapped_libraries_work_on():
    run = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    before, unmapped, after = map(int, run.stdout.split())
    assert unmapped > 0.7 * before
    assert after < 0.3 * before
