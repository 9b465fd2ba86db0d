"""One run: everything of a plan, one comparison after the other, results kept as they come.

A peer that fails is left out from there on and named in the results; Tandem failing ends the run.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import startup

from peers import arrivals, interference, limits
from peers.checkpoints import checkpoint_of
from peers.engines.base import ROOT, Engine, ServerEngine, Setting
from peers.engines.registry import INSTALLATION, open_engine
from peers.install.peers import NOT_HERE, VERSIONS
from peers.install.steps import CONSOLE
from peers.machine import description
from peers.plan import BATCH_STREAMS, SMALL, Comparison, Plan, kv_bytes
from peers.processes import PeerError
from peers.results import Memory, Results, StartupTimes
from peers.rounds import Sample, play_rounds
from peers.shapes import BYTES, SHAPES
from peers.workloads import WORKLOADS, warm_up

LONG_STREAM_TOKENS = 1024
LONG_PROMPTS = 6
GAP_IN_LONE_PROMPTS = 3.0


@dataclass(kw_only=True)
class Session:
    """Runs a plan; `results` has what is known so far."""

    plan: Plan
    home: Path
    results: Results

    def run(self) -> None:
        began = time.monotonic()
        self._limits()
        for comparison in self.plan.comparisons:
            self._compare(comparison)
        for dtype in self.plan.served_dtypes:
            self._disaggregated(dtype)
            self._arrivals(dtype)
            self._interference(dtype)
        if "startup" in self.plan.parts:
            CONSOLE.print("start-up")
            times = startup.measure(3)
            self.results.startup = StartupTimes(ready_s=times.ready_s, help_s=times.help_s, parts=times.parts)
        self._limits()
        self.results.minutes = round((time.monotonic() - began) / 60, 1)

    def _limits(self) -> None:
        if "limits" in self.plan.parts:
            CONSOLE.print("limits of the machine")
            found = limits.measure(self.plan.threads)
            self.results.limits = found if self.results.limits is None else limits.better(self.results.limits, found)

    def _setting(self, model: str, dtype: str, streams: int) -> Setting:
        return Setting(
            checkpoint=checkpoint_of(self.home, model, dtype),
            dtype=dtype,
            threads=self.plan.threads,
            kv_gib=round(kv_bytes(model, dtype, streams) / (1 << 30), 3),
            home=self.home,
            logs=self.home / "logs" / f"{model}-{dtype}",
            streams=streams,
        )

    @contextmanager
    def _opened(self, names: Sequence[str], setting: Setting) -> Iterator[list[Engine]]:
        """Those that start; each is paused once it is ready."""
        with ExitStack() as stack:
            engines = []
            for name in names:
                if INSTALLATION.get(name) in self.results.missing:
                    continue
                with CONSOLE.status(f"starting {name}"):
                    engine = self._start(name, setting)
                if engine is not None:
                    stack.callback(engine.close)
                    engine.pause()
                    engines.append(engine)
            yield engines

    def _start(self, name: str, setting: Setting) -> Engine | None:
        try:
            return open_engine(name, setting)
        except PeerError as error:
            self._failed(name, error)
            return None

    def _failed(self, name: str, error: PeerError) -> None:
        if name.startswith("tandem"):
            raise error
        self.results.failed.append(f"{name}: {str(error).splitlines()[0]}")
        CONSOLE.print(f"{name} is left out: {error}")

    def _compare(self, comparison: Comparison) -> None:
        CONSOLE.print(f"{comparison.model} {comparison.dtype}: {', '.join(comparison.engines)}")
        setting = self._setting(comparison.model, comparison.dtype, comparison.streams)
        with self._opened(comparison.engines, setting) as opened:
            engines = [each for each in opened if self._warm(each, comparison)]
            self._play(engines, comparison)
            ours = next((each for each in engines if each.name == "tandem"), None)
            if ours is not None and not comparison.first_round:
                self._remember(ours, comparison)

    def _warm(self, engine: Engine, comparison: Comparison) -> bool:
        engine.resume()
        try:
            with CONSOLE.status(f"warming {engine.name} up"):
                warm_up(engine.run, batch=any(name not in ("single", "prefill") for name in comparison.workloads))
        except PeerError as error:
            self._failed(engine.name, error)
            return False
        engine.pause()
        return True

    def _play(self, engines: Sequence[Engine], comparison: Comparison) -> None:
        """Every workload; a peer that fails in one plays no more."""
        playing = list(engines)
        numbers = range(comparison.first_round, comparison.first_round + comparison.rounds)
        for name in comparison.workloads:
            where = {"model": comparison.model, "dtype": comparison.dtype, "numbers": numbers}
            failed = play_rounds(
                playing, WORKLOADS[name], **where, budget_s=self.plan.budget_s, told=self._told, failed=self._failed
            )
            playing = [each for each in playing if each.name not in failed]

    def _told(self, sample: Sample) -> None:
        self.results.samples.append(sample)
        figures = "  ".join(f"{name} {value:,.4g}" for name, value in sample.figures.items())
        equal = "" if sample.equal is None else f"  equal {sample.equal:.0%}"
        busy = "" if sample.idle else " (the machine was not idle before)"
        line = f"  {sample.workload:<14} {sample.round:>3}  {sample.engine:<16} {figures}{equal}"
        CONSOLE.print(f"{line}  others {sample.others:.0%}{busy}")

    def _remember(self, engine: Engine, comparison: Comparison) -> None:
        """How much memory it holds after everything that it did."""
        engine.resume()
        facts: dict[str, Any] = engine.facts()
        shape = SHAPES[comparison.model]
        self.results.memory.append(
            Memory(
                model=comparison.model,
                dtype=comparison.dtype,
                resident=facts["resident_bytes"],
                bare=facts["bare_bytes"],
                weights=shape.parameters * BYTES[comparison.dtype],
                kv_pool=comparison.kv_bytes,
            )
        )

    def _disaggregated(self, dtype: str) -> None:
        """Ours beside vLLM's, over HTTP on the same cores."""
        if "disaggregated" not in self.plan.parts or "vllm" not in self.plan.peers:
            return
        comparison = Comparison(
            model=SMALL,
            dtype=dtype,
            engines=("tandem 1P+1D", "vllm 1P+1D"),
            workloads=("offline", "single"),
            rounds=min(2, self.plan.interference_rounds),
            streams=BATCH_STREAMS,
        )
        self._compare(comparison)

    def _arrivals(self, dtype: str) -> None:
        if "arrivals" not in self.plan.parts:
            return
        CONSOLE.print(f"{SMALL} {dtype}: steady arrivals")
        names = ("tandem mixed", *(name for name in ("vllm serve", "llama.cpp") if name.split()[0] in self.plan.peers))
        with self._opened(names, self._setting(SMALL, dtype, BATCH_STREAMS)) as engines:
            for engine in engines:
                assert isinstance(engine, ServerEngine), "arrivals go to servers"
                try:
                    loads = arrivals.at_shares(engine, model=SMALL, dtype=dtype, count=self.plan.arrivals)
                except PeerError as error:
                    self._failed(engine.name, error)
                    continue
                for load in loads:
                    self.results.loads.append(load)
                    line = f"  {engine.name:<14} {load.rate:.1f} requests/s  TTFT p50 {load.ttft_ms['p50']:.0f} ms"
                    CONSOLE.print(f"{line}  ITL p99 {load.itl_ms['p99']:.1f} ms  others {load.others:.0%}")

    def _interference(self, dtype: str) -> None:
        if "interference" not in self.plan.parts:
            return
        CONSOLE.print(f"{SMALL} {dtype}: long decodes under arriving prompts")
        with self._opened(("tandem mixed", "tandem 1P+1D"), self._setting(SMALL, dtype, BATCH_STREAMS)) as engines:
            servers = [engine for engine in engines if isinstance(engine, ServerEngine)]
            lone = {server.name: interference.lone_prompt_s(server) for server in servers}
            gap_s = GAP_IN_LONE_PROMPTS * lone["tandem mixed"]
            work = {"gap_s": gap_s, "output": LONG_STREAM_TOKENS, "prompts": LONG_PROMPTS}
            for number in range(self.plan.interference_rounds):
                for server in servers:
                    each = interference.play(server, number, model=SMALL, dtype=dtype, **work)
                    self.results.interference.append(each)
                    latency = f"ITL p50 {each.itl_ms['p50']:.1f} p99 {each.itl_ms['p99']:.1f} ms"
                    rate = f"{each.tokens_per_s:,.0f} tokens/s  others {each.others:.0%}"
                    CONSOLE.print(f"  {number:>3}  {server.name:<14} {latency}  {rate}")


def new_results(plan: Plan, missing: dict[str, str]) -> Results:
    """What is known before anything is measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Results(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=commit.stdout.strip() or "not a git checkout",
        threads=plan.threads,
        machine=description(),
        versions={
            "torch": version("torch"),
            "transformers": version("transformers"),
            "nixl": version("nixl"),
            **{peer: what for peer, what in VERSIONS.items() if peer in plan.wanted_peers and peer not in missing},
        },
        missing={**missing, **NOT_HERE},
    )
