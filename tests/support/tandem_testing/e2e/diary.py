"""What a run of the end-to-end tests did and measured, in its order: printed at its end, and kept as JSON."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tandem_lab.bench.load import Summary


@dataclass(kw_only=True)
class Diary:
    """One for the session."""

    versions: dict[str, str] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def step(self, what: str) -> Iterator[dict[str, Any]]:
        """Times what is done inside, which may add figures to the entry."""
        began = time.monotonic()
        entry: dict[str, Any] = {"step": what}
        yield entry
        entry["seconds"] = round(time.monotonic() - began, 1)
        self.entries.append(entry)

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{name} {version}" for name, version in self.versions.items()]
        for entry in self.entries:
            figures = {key: value for key, value in entry.items() if key not in ("step", "seconds", "load")}
            load = entry.get("load")
            asked = (
                f"  {load['requests']} requests, {load['failed']} failed, {load['mismatched']} wrong" if load else ""
            )
            more = "".join(f"  {key} {value}" for key, value in figures.items())
            lines.append(f"{entry['seconds']:7.1f} s  {entry['step']}{asked}{more}")
        loads = [entry["load"] for entry in self.entries if "load" in entry]
        lines.append(f"requests under load: {sum(one['requests'] for one in loads)} sent, {self.failed()} failed")
        return lines

    def failed(self) -> int:
        """Requests of all loads that failed or had a wrong answer."""
        return sum(entry["load"]["failed"] + entry["load"]["mismatched"] for entry in self.entries if "load" in entry)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"versions": self.versions, "steps": self.entries}, indent=1) + "\n")


def of_load(summary: Summary) -> dict[str, Any]:
    """What an entry keeps of a load."""
    built: dict[str, Any] = msgspec.to_builtins(summary)
    kept = ("requests", "failed", "mismatched", "checked", "requests_per_s", "output_tokens_per_s", "errors")
    figures = {key: built[key] for key in kept}
    for name in ("ttft_ms", "itl_ms"):
        figures[name] = built[name] and {key: round(built[name][key], 1) for key in ("p50", "p99", "max")}
    return figures
