"""Which library, if any, computes rows of long prompts: chosen at start, by measurement or by a flag.

    1. refused    by what it supports (`prompt_libraries`), without an import
    2. checked    a short row by it and by our kernels: dropped if it raises, or differs by more than its dtype rounds
    3. measured   long rows of the model's shape, pages gathered, each of another length: prompts have one each, and
                  cuDNN builds a plan for each, in half a second; until `BUDGET_S` is used up
    4. chosen     the fastest, if it is faster than ours by `MARGIN`; and the log has all times and reasons

Rows with a prefix and without are chosen for apart, since not every library takes both. Results of 3 are kept in a
file in Triton's folder, by card, versions and shapes. A start that finds one measures nothing, and still checks what it
uses.

`--attention-backend NAME` measures nothing: it is that library, or an error with the reason. Layers and rows that it
does not take are ours, which the log says; a model of which it takes none is an error, too (`require_use`).

A library that raises in service is used no more, and our kernels compute what it failed at (`long_rows`).
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem_engine.base.errors import ConfigError
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.prompt_libraries import (
    AUTO,
    LIBRARIES,
    OURS,
    AttentionFacts,
    DenseAttend,
    Library,
    version_of,
)

logger = logging.getLogger(__name__)

FLAG = "--attention-backend"

BUDGET_S = 20.0
"""After so many seconds of measuring, no further library is tried."""

MARGIN = 0.95
"""A library's time must be at most this part of ours: less is noise, and would differ from start to start."""

LEAST_QUERIES = 1024
"""Rows of fewer are always ours: graphs run them, and libraries gain little."""

FILE_CHARACTERS = 4096
"""More than a file of results has."""

ROUNDINGS = 2.0
"""A library may differ from ours by so many roundings of the largest number: each rounds weights and results once."""

Run = Callable[[DenseAttend | None, int, int], Callable[[], Tensor]]
"""(library or ours, queries, tokens before them) to a call that computes such a row, the same numbers each time."""

TimeOf = Callable[[Iterable[Callable[[], Tensor]]], float]
"""Seconds of one of these calls."""


class Shape(NamedTuple):
    """Of a row."""

    queries: int
    before: int


CHECKED = {False: Shape(70, 0), True: Shape(40, 57)}
MEASURED = {False: Shape(4096, 0), True: Shape(2048, 6144)}
"""By whether there is a prefix."""

SHORTER = tuple(range(0, 35, 5))
"""By so many queries, one after the other."""

FIRST = 2
"""Of those, which are not timed: they compile and load."""


class PromptChoice(NamedTuple):
    """For layers of one spec. None is our kernel."""

    first: DenseAttend | None
    behind: DenseAttend | None
    """Of rows with a prefix."""

    def of(self, before: int) -> DenseAttend | None:
        """For a row behind so many tokens."""
        return self.behind if before else self.first


NONE = PromptChoice(None, None)


def device_seconds(runs: Iterable[Callable[[], Tensor]]) -> float:
    """Median on the current device, the first left out. What the host does in the meantime counts."""
    times: list[float] = []
    for run in runs:
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1000)
    times = sorted(times[FIRST:])
    return times[len(times) // 2]


@dataclass(kw_only=True, slots=True)
class PromptChooser:
    """Chooses once for each shape and spec in a process. Called where runners are built."""

    wanted: str = AUTO
    """`AUTO`, `OURS`, or the library that a flag names."""
    least_queries: int = LEAST_QUERIES
    """More than a graph has, so that a row's kernel does not depend on its company."""
    folder: Callable[[], Path | None] = lambda: None
    """For files of results; it is made when one is written."""
    libraries: Sequence[Library] = LIBRARIES
    time_of: TimeOf = device_seconds
    now: Callable[[], float] = time.monotonic
    _chosen: dict[tuple[AttentionFacts, AttentionSpec, bool], PromptChoice] = field(default_factory=dict)
    _loaded: dict[tuple[str, AttentionFacts], DenseAttend] = field(default_factory=dict)
    _left: dict[str, None] = field(default_factory=dict)
    """Why layers are ours although a flag names a library."""

    def choose(self, facts: AttentionFacts, spec: AttentionSpec, run: Run) -> PromptChoice:
        """For layers of `spec`. Raises `ConfigError` if a flag names a library that fails; what it does not take is
        ours.
        """
        key = facts, spec, spec.sinks is not None
        if key not in self._chosen:
            # As steps run: what is compiled for one mode is compiled again for the other.
            with torch.inference_mode():
                chosen = [self._for_rows(facts, spec, run, before=before) for before in (False, True)]
            self._chosen[key] = PromptChoice(*chosen)
            if facts.device.type == "cuda":
                torch.cuda.empty_cache()
        return self._chosen[key]

    def leave(self, reason: str) -> None:
        """Layers that only we compute."""
        self._left[reason] = None

    def require_use(self) -> None:
        """Called once all layers of a model have been chosen for. Raises `ConfigError` if a flag names a library that
        takes none of them, nor any before.
        """
        if self.wanted not in (AUTO, OURS) and not self._used:
            why = ", ".join(self._left) or "no layer has attention"
            raise ConfigError(f"{FLAG} {self.wanted}: {why}; use {AUTO}")

    @property
    def _used(self) -> bool:
        return any(choice != NONE for choice in self._chosen.values())

    def _candidates(self) -> Sequence[Library]:
        return self.libraries if self.wanted == AUTO else [one for one in self.libraries if one.name == self.wanted]

    def _for_rows(self, facts: AttentionFacts, spec: AttentionSpec, run: Run, *, before: bool) -> DenseAttend | None:
        """Without a library that could take such rows nothing is run, imported or logged."""
        refused = {one.name: _refusal(one, facts, spec, before=before) for one in self._candidates()}
        candidates = [one for one in self._candidates() if not refused[one.name]]
        if self.wanted == OURS or (self.wanted == AUTO and not candidates):
            return None
        dropped = {name: reason for name, reason in refused.items() if reason}
        trial = _Trial(run=run, before=before, dropped=dropped, loaded=self._loaded)
        if not candidates:
            self.leave(refused[self.wanted])
            self._report(facts, spec, trial, OURS, "whatever the flag says")
            return None
        if self.wanted != AUTO:
            chosen = trial.checked(candidates[0], facts)
            if chosen is None:
                raise ConfigError(f"{FLAG} {self.wanted}: {trial.dropped[self.wanted]}; use {AUTO}")
            self._report(facts, spec, trial, self.wanted, "as the flag says")
            return chosen
        return self._fastest(facts, spec, candidates, trial)

    def _fastest(
        self, facts: AttentionFacts, spec: AttentionSpec, candidates: Sequence[Library], trial: "_Trial"
    ) -> DenseAttend | None:
        by_name = {one.name: one for one in candidates}
        file = self._file(facts, spec, candidates, before=trial.before)
        times, source = _read(file, {OURS, *by_name}), "measured by an earlier start"
        if times is None or (chosen_of(times) != OURS and trial.checked(by_name[chosen_of(times)], facts) is None):
            times, source = self._measure(facts, candidates, trial), "measured"
            _write(file, times)
        trial.times = times
        name = chosen_of(times)
        self._report(facts, spec, trial, name, source)
        return None if name == OURS else trial.checked(by_name[name], facts)

    def _measure(self, facts: AttentionFacts, candidates: Sequence[Library], trial: "_Trial") -> dict[str, float]:
        began, shape = self.now(), MEASURED[trial.before]

        def rows(attend: DenseAttend | None) -> Iterator[Callable[[], Tensor]]:
            return (trial.run(attend, shape.queries - less, shape.before) for less in SHORTER)

        times = {OURS: self.time_of(rows(None))}
        for one in candidates:
            if self.now() - began > BUDGET_S:
                trial.dropped[one.name] = f"not tried: {BUDGET_S:g} s of measuring are over"
                continue
            attend = trial.checked(one, facts)
            if attend is None:
                continue
            try:
                times[one.name] = self.time_of(rows(attend))
            except Exception as error:  # noqa: BLE001 - whatever a library raises costs it its place
                trial.dropped[one.name] = f"a row of {shape.queries} tokens failed: {_clause(error)}"
        return times

    def _report(self, facts: AttentionFacts, spec: AttentionSpec, trial: "_Trial", name: str, source: str) -> None:
        dtype = str(facts.dtype).removeprefix("torch.")
        rows = "behind cached tokens" if trial.before else "from the beginning"
        window = "" if spec.window is None else f", window {spec.window}"
        times = ", ".join(f"{one} {1000 * seconds:.2f} ms" for one, seconds in trial.times.items())
        dropped = "; ".join(f"{one}: {reason}" for one, reason in trial.dropped.items())
        logger.info(
            "attention of prompts of %d tokens and more %s, %d heads of %d over %d, %s%s: %s (%s%s)%s",
            self.least_queries,
            rows,
            facts.heads,
            facts.head_dim,
            facts.kv_heads,
            dtype,
            window,
            name,
            source,
            f": {times}" if times else "",
            f"; not used: {dropped}" if dropped else "",
        )

    def _file(
        self, facts: AttentionFacts, spec: AttentionSpec, candidates: Sequence[Library], *, before: bool
    ) -> Path | None:
        folder = self.folder()
        if folder is None:
            return None
        card = torch.cuda.get_device_name(facts.device) if facts.device.type == "cuda" else "cpu"
        packages = ("torch", "triton", *(package for one in candidates for package in one.packages))
        versions = {package: version_of(package) for package in packages}
        shape = facts._replace(device=torch.device(facts.device.type))
        named = (card, facts.capability, versions, shape, spec, MEASURED[before], [one.name for one in candidates])
        return folder / f"{hashlib.blake2b(repr(named).encode(), digest_size=16).hexdigest()}.json"


@dataclass(kw_only=True, slots=True)
class _Trial:
    """What was tried of one kind of rows."""

    run: Run
    before: bool
    dropped: dict[str, str] = field(default_factory=dict)
    """Why, by name."""
    times: Mapping[str, float] = field(default_factory=dict)
    loaded: dict[tuple[str, AttentionFacts], DenseAttend] = field(default_factory=dict)
    """So that layers of one kind have one, whichever spec it was tried for."""
    _checked: dict[str, DenseAttend | None] = field(default_factory=dict)

    def checked(self, library: Library, facts: AttentionFacts) -> DenseAttend | None:
        """Loaded, and found to compute what our kernels do; None, and why in `dropped`, if it does not."""
        if library.name not in self._checked:
            self._checked[library.name] = self._check(library, facts)
        return self._checked[library.name]

    def _check(self, library: Library, facts: AttentionFacts) -> DenseAttend | None:
        shape = CHECKED[self.before]
        try:
            key = library.name, facts
            attend = self.loaded[key] if key in self.loaded else self.loaded.setdefault(key, library.load(facts))
            ours, theirs = (self.run(each, *shape)().float() for each in (None, attend))
        except Exception as error:  # noqa: BLE001 - whatever a library raises costs it its place
            self.dropped[library.name] = f"failed: {_clause(error)}"
            return None
        allowed = ROUNDINGS * torch.finfo(facts.dtype).eps * max(1.0, float(ours.abs().max()))
        differs = float((ours - theirs).abs().max())
        if not differs <= allowed:
            self.dropped[library.name] = f"differs by {differs:.3g} where {allowed:.3g} is rounding"
            return None
        return attend


def chosen_of(times: Mapping[str, float]) -> str:
    """The fastest; ours unless another is faster by `MARGIN`."""
    name = min(times, key=times.__getitem__)
    return name if times[name] <= MARGIN * times[OURS] else OURS


def _refusal(library: Library, facts: AttentionFacts, spec: AttentionSpec, *, before: bool) -> str:
    refusal = library.supports.refusal(facts, spec)
    return refusal or ("it takes no prefix" if before and not library.supports.prefix else "")


def _clause(error: Exception) -> str:
    """Its first line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _read(file: Path | None, names: set[str]) -> dict[str, float] | None:
    """Times by name; None where there is no file of those names. What it holds is not trusted beyond that."""
    if file is None:
        return None
    try:
        with file.open() as opened:
            times = json.loads(opened.read(FILE_CHARACTERS))
    except (OSError, ValueError, RecursionError):
        return None
    good = (
        isinstance(times, dict)
        and OURS in times
        and names >= set(times)
        and all(isinstance(seconds, float) and 0.0 < seconds < math.inf for seconds in times.values())
    )
    return times if good else None


def _write(file: Path | None, times: Mapping[str, float]) -> None:
    """So that a reader finds all of it or none. In a folder that cannot be written nothing is kept."""
    if file is None:
        return
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps(times))
        part.replace(file)
    except OSError as error:
        logger.warning("times of attention cannot be kept in %s: %s", file.parent, error)
