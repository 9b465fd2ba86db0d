"""Tables of a run, in Markdown: what a terminal shows and what docs/benchmarks.md has are the same."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import ratio_plot

from peers.ratios import ENGINES, combinations, middle, speed
from peers.results import Results
from peers.targets import AGAINST_BEST, NAMES, Target, bandwidth_share, gemm_share, others_share, targets
from peers.workloads import FIGURES

SIDES = ("tandem", "vllm", "llama.cpp", "transformers", "transformers CB", "tandem 1P+1D", "vllm 1P+1D")


def markdown(results: Results) -> str:
    """All tables, each under a line that says what it shows."""
    parts = [_heading(results), *_engines(results), _bounds(results), _loads(results), _interference(results)]
    parts += [_memory(results), _held(results), _startup(results), targets_table(targets(results)), _missing(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def figure(value: float | None) -> str:
    """Three digits that count, and thousands in full."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _heading(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(
        f"{name} {what.removeprefix(name)}".replace("  ", " ") for name, what in results.versions.items()
    )
    return (
        f"{results.date}, commit {results.commit}, {results.threads} threads on {machine['cpu']} "
        f"({machine['cores']} cores, {machine['vectors']}), {machine['memory_gib']} GiB, Python {machine['python']}; "
        f"{versions}. {results.minutes:g} minutes; others used {others_share(results):.0%} of the machine on average."
    )


def _engines(results: Results) -> list[str]:
    """For each model and dtype the medians of every engine, and below them how many times faster ours is."""
    parts = []
    for model, dtype in combinations(results.samples):
        names = [
            name
            for name in FIGURES
            if any(name in s.figures for s in results.samples if (s.model, s.dtype) == (model, dtype))
        ]
        rows = []
        for engine in SIDES:
            values = [middle(results.samples, engine, model, dtype, name) for name in names]
            if any(value is not None for value in values):
                rows.append([engine, *map(figure, values), _equal(results, engine, model, dtype)])
        for theirs in (*ENGINES, "transformers CB"):
            ratios = [speed(results.samples, model, dtype, name, theirs) for name in names]
            if any(ratio is not None for ratio in ratios):
                cells = ["" if ratio is None else f"**{ratio:.2f}**" for ratio in ratios]
                rows.append([f"*times faster than {theirs}*", *cells, ""])
        head = [
            f"{model} {dtype}",
            *(f"{name.removesuffix('_ms')}, {FIGURES[name].unit}" for name in names),
            "equal outputs",
        ]
        parts.append(table(head, rows))
    return parts


def _equal(results: Results, engine: str, model: str, dtype: str) -> str:
    """Mean share of jobs whose tokens equal ours."""
    shares = [
        sample.equal
        for sample in results.samples
        if (sample.engine, sample.model, sample.dtype) == (engine, model, dtype) and sample.equal is not None
    ]
    return f"{sum(shares) / len(shares):.1%}" if shares and engine != "tandem" else ""


def _bounds(results: Results) -> str:
    if results.limits is None:
        return ""
    rows = []
    for model, dtype in combinations(results.samples):
        shares = [share(results, model, dtype) for share in (bandwidth_share, gemm_share)]
        if any(share is not None for share in shares):
            rows.append([f"{model} {dtype}", *("" if share is None else f"{share:.0%}" for share in shares)])
    gflops = ", ".join(f"{rate:.0f} in {dtype}" for dtype, rate in results.limits.gflops.items())
    limits = (
        f"Limits measured in the same run: memory {results.limits.memory_gb_s:.1f} GB/s, products {gflops} GFLOP/s."
    )
    head = ["share of the limit", "memory bandwidth in single-stream decode", "matrix products in a prefill of 2,048"]
    return f"{limits}\n\n{table(head, rows)}" if rows else limits


def _loads(results: Results) -> str:
    if not results.loads:
        return ""
    head = ["steady arrivals", "share of its capacity", "requests/s", "TTFT p50 / p99, ms", "ITL p50 / p99, ms"]
    rows = [
        [
            f"{load.engine}, {load.model} {load.dtype}",
            f"{load.share:.0%}",
            f"{load.rate:.2f}",
            f"{figure(load.ttft_ms['p50'])} / {figure(load.ttft_ms['p99'])}",
            f"{figure(load.itl_ms['p50'])} / {figure(load.itl_ms['p99'])}",
        ]
        for load in results.loads
    ]
    return table(head, rows)


def _interference(results: Results) -> str:
    if not results.interference:
        return ""
    head = [
        "long decodes under arriving prompts",
        "round",
        "ITL p50 / p99 / max, ms",
        "tokens/s",
        "TTFT of prompts p50 / max, ms",
    ]
    rows = [
        [
            f"{each.engine}, {each.model} {each.dtype}",
            str(each.round),
            " / ".join(figure(each.itl_ms[key]) for key in ("p50", "p99", "max")),
            figure(each.tokens_per_s),
            f"{figure(each.ttft_ms['p50'])} / {figure(each.ttft_ms['max'])}",
        ]
        for each in sorted(results.interference, key=lambda each: (each.model, each.dtype, each.engine, each.round))
    ]
    return table(head, rows)


def _memory(results: Results) -> str:
    if not results.memory:
        return ""
    rows = [
        [
            f"{each.model} {each.dtype}",
            *(f"{size / (1 << 20):,.0f}" for size in (each.resident, each.bare, each.weights, each.kv_pool)),
            f"{each.ratio:.2f}",
            f"{each.own:.2f}" if each.own else "",
        ]
        for each in results.memory
    ]
    return table(["memory, MiB", "engine", "torch alone", "weights", "KV pool", "ratio", "without files"], rows)


def _held(results: Results) -> str:
    if not results.held:
        return ""
    rows = [
        [
            f"{each.model} {each.dtype}, projections in {each.dtype if each.held == 'dtype' else each.held}",
            figure(each.decode_ms),
            f"{each.decode_share:.0%}",
            figure(each.prefill),
        ]
        for each in results.held
    ]
    return table(["weights, engine alone", "decode, ms per token", "of bandwidth", "prefill, prompt tokens/s"], rows)


def _startup(results: Results) -> str:
    if results.startup is None:
        return ""
    times = results.startup
    ready = f"`tandem up` with the bundled model is ready after {times.ready_s:.1f} s"
    return f"{ready}; `tandem --help` takes {times.help_s:.2f} s."


def targets_table(found: Sequence[Target]) -> str:
    """Each with its bound, and whether it is met."""
    rows = [
        [
            target.name,
            "" if target.ratio is None else f"{target.ratio:.2f}",
            f"{'≤' if target.at_most else '≥'} {target.target:g}",
            _verdict(target),
        ]
        for target in found
    ]
    return table(["target", "measured", "wanted", ""], rows) if rows else ""


def _verdict(target: Target) -> str:
    if target.ratio is None:
        return f"not measured: {target.reason}"
    if target.met:
        return "met"
    short = target.ratio / target.target - 1 if target.at_most else 1 - target.ratio / target.target
    return f"missed by {short:.0%}"


def _missing(results: Results) -> str:
    lines = [f"{peer} is not there: {why}." for peer, why in results.missing.items()]
    lines += [f"{stage.name}, after {stage.seconds:.0f} s: {note}." for stage in results.stages for note in stage.notes]
    return "\n".join(f"- {line}" for line in lines)


def plot(results: Results, path: Path) -> None:
    """How many times faster ours is than each engine, with the target against the best of them."""
    groups, marks = {}, {}
    for model, dtype in combinations(results.samples):
        for name in FIGURES:
            ratios = {theirs: speed(results.samples, model, dtype, name, theirs) for theirs in ENGINES}
            row = {theirs: ratio for theirs, ratio in ratios.items() if ratio is not None}
            if row:
                label = f"{NAMES.get(name, name.removesuffix('_ms'))}, {model} {dtype}"
                groups[label] = row
                if name in AGAINST_BEST[dtype]:
                    marks[label] = AGAINST_BEST[dtype][name]
    if groups:
        title = "How many times faster Tandem is (dashed: target against the best)"
        ratio_plot.draw(path, groups, title=title, marks=marks)
