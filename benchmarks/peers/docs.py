"""The section "Side by side" of docs/benchmarks.md, written from the results of a run.

    PYTHONPATH=benchmarks python -m peers.docs results/peers.json

keeps the results as docs/benchmarks/peers.json, draws docs/benchmarks/peers.svg, and replaces what stands between the
two marks in docs/benchmarks.md. Nothing else in that file is touched.
"""

import argparse
from pathlib import Path

from peers.engines.base import ROOT
from peers.report import markdown, plot
from peers.results import Results, read, write

BEGIN = "<!-- written by peers.docs from benchmarks/peers.json -->"
END = "<!-- end of what peers.docs writes -->"


def write_docs(results: Results, root: Path = ROOT) -> None:
    """Raises `ValueError` when docs/benchmarks.md lacks a mark."""
    page = root / "docs" / "benchmarks.md"
    text = replaced(page.read_text("utf-8"), f"{markdown(results)}\n![how many times faster](benchmarks/peers.svg)")
    write(results, root / "docs" / "benchmarks" / "peers.json")
    plot(results, root / "docs" / "benchmarks" / "peers.svg")
    page.write_text(text, "utf-8")


def replaced(page: str, tables: str) -> str:
    """The page with other tables between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/benchmarks.md has no line {BEGIN!r} followed by one {END!r}")
    return f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what a run wrote with --out")
    write_docs(read(parser.parse_args().results))


if __name__ == "__main__":
    main()
