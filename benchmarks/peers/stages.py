"""The stages of a plan, the most wanted figures first, and what each of them does.

The limits of the machine are measured at the beginning and at the end: a limit is the most that was seen.
"""

import sys
from functools import partial

import msgspec

from peers import arrivals, interference, limits
from peers.checkpoints import checkpoint_of
from peers.engines.base import BENCHMARKS, Engine, ServerEngine, python_path
from peers.install.steps import CONSOLE
from peers.plan import BATCH_STREAMS, SMALL, Comparison, Plan
from peers.processes import PeerError, output_of
from peers.results import (
    BESIDE_CONTINUOUS,
    DECODES_UNDER_PROMPTS,
    DISAGGREGATED,
    STARTUP,
    HeldWeights,
    Memory,
    StartupTimes,
)
from peers.rounds import Rounds, Sample
from peers.session import Session, Stage
from peers.workloads import WORKLOADS, warm_up

LIMITS_S = 12.0
STARTUP_S = 45.0
MEMORY_S = {"q25m": 35.0, "q125m": 45.0, "q500m": 60.0}
INT8_S = {"q25m": 30.0, "q125m": 50.0, "q500m": 90.0}
SET_UP_S = {"q25m": 35.0, "q125m": 40.0, "q500m": 45.0}
"""Starting and warming up the engines of a comparison."""
PLAY_S = {"offline": 45.0, "single": 5.0, "prefill": 4.5, "shared": 31.0, "conversations": 15.0}
"""One round of all engines on the small model in float32, waiting for an idle machine included."""
TIMES_SMALL = {"q25m": 1.0, "q125m": 3.0, "q500m": 5.0}
TIMES_FLOAT32 = {"float32": 1.0, "bfloat16": 0.75}
CONTINUOUS_S = 50.0
"""Its managers, one for each batch, take ten seconds each to set up."""
SERVERS_S = 60.0
"""Starting servers and warming them up."""
LOAD_S = 0.7
"""Of a request at three rates on three servers."""
INTERFERENCE_S = 15.0
"""One round of both sides."""


def stages_of(plan: Plan) -> list[Stage]:
    """In the order they are run."""
    stages = [_compare(comparison) for comparison in plan.comparisons]
    stages += [stage for dtype in plan.served_dtypes for stage in _served(plan, dtype)]
    if "startup" in plan.parts:
        stages.insert(0, Stage(name=STARTUP, weight_s=STARTUP_S, run=startup))
    stages += [_memory(model, dtype) for model, dtype in plan.remembered]
    stages += [_int8(model, dtype) for model, dtype in plan.held]
    if "limits" in plan.parts:
        first, last = ("limits of the machine", "limits of the machine again")
        stages.insert(0, Stage(name=first, weight_s=LIMITS_S, run=machine_limits))
        stages.append(Stage(name=last, weight_s=LIMITS_S, run=machine_limits))
    return stages


def _compare(comparison: Comparison) -> Stage:
    behind = BESIDE_CONTINUOUS if "transformers CB" in comparison.engines else ""
    return Stage(
        name=f"{comparison.model} {comparison.dtype}{behind}",
        weight_s=compare_seconds(comparison),
        run=partial(compare, comparison=comparison),
    )


def _memory(model: str, dtype: str) -> Stage:
    run = partial(memory, model=model, dtype=dtype)
    return Stage(name=f"memory {model} {dtype}", weight_s=MEMORY_S[model], run=run)


def _int8(model: str, dtype: str) -> Stage:
    run = partial(int8_weights, model=model, dtype=dtype)
    return Stage(name=f"int8 weights {model} {dtype}", weight_s=INT8_S[model], run=run)


def compare_seconds(comparison: Comparison) -> float:
    """What it takes on two idle cores, roughly."""
    slower = TIMES_SMALL[comparison.model] * TIMES_FLOAT32[comparison.dtype]
    a_round = sum(PLAY_S[name] for name in comparison.workloads) * slower
    managers = CONTINUOUS_S if "transformers CB" in comparison.engines else 0.0
    return SET_UP_S[comparison.model] + managers + comparison.rounds * a_round


def _served(plan: Plan, dtype: str) -> list[Stage]:
    where = f"{SMALL} {dtype}"
    pair = disaggregated(plan, dtype)
    return [
        stage
        for part, stage in (
            (
                "disaggregated",
                Stage(
                    name=f"{where}{DISAGGREGATED}",
                    weight_s=SERVERS_S + 40 * pair.rounds,
                    run=partial(compare, comparison=pair),
                ),
            ),
            (
                "interference",
                Stage(
                    name=f"{where}{DECODES_UNDER_PROMPTS}",
                    weight_s=SERVERS_S / 2 + INTERFERENCE_S * plan.interference_rounds,
                    run=partial(decodes_under_prompts, dtype=dtype),
                ),
            ),
            (
                "arrivals",
                Stage(
                    name=f"{where} steady arrivals",
                    weight_s=SERVERS_S + LOAD_S * 3 * plan.arrivals,
                    run=partial(steady_arrivals, dtype=dtype),
                ),
            ),
        )
        if part in plan.parts
    ]


def disaggregated(plan: Plan, dtype: str) -> Comparison:
    """Ours beside vLLM's, over HTTP on the same cores."""
    return Comparison(
        model=SMALL,
        dtype=dtype,
        engines=("tandem 1P+1D", *(("vllm 1P+1D",) if "vllm" in plan.peers else ())),
        workloads=("offline", "single"),
        rounds=plan.disaggregated_rounds,
        streams=BATCH_STREAMS,
    )


def machine_limits(session: Session) -> None:
    found = limits.measure(session.plan.threads, log=session.log("limits"), limit_s=session.deadline.wait_s(120))
    known = session.results.limits
    session.results.limits = found if known is None else limits.better(known, found)


def startup(session: Session) -> None:
    output = output_of(
        [sys.executable, str(BENCHMARKS / "start_time.py"), "--json"],
        log=session.log("start-up"),
        limit_s=session.deadline.wait_s(300),
        environment=python_path(),
    )
    session.results.startup = msgspec.json.decode(output, type=StartupTimes)


def memory(session: Session, *, model: str, dtype: str) -> None:
    """Of a worker of `tandem up`, by the benchmark that is about nothing else."""
    argv = [sys.executable, str(BENCHMARKS / "worker_memory.py"), str(checkpoint_of(session.home, model, dtype))]
    output = output_of(
        [*argv, "--dtypes", dtype, "--threads", str(session.plan.threads)],
        log=session.log(f"memory-{model}-{dtype}"),
        limit_s=session.deadline.wait_s(300),
        environment=python_path(),
    )
    mib = msgspec.json.decode(output.splitlines()[-1], type=dict[str, int | float | str])
    sizes = {
        name: round(float(mib[key]) * (1 << 20))
        for name, key in (("resident", "full"), ("bare", "torch"), ("weights", "weights"), ("kv_pool", "kv_pool"))
    }
    each = Memory(model=model, dtype=dtype, **sizes, own=float(mib["share_own"]), stage=session.stage)
    session.results.memory.append(each)
    CONSOLE.print(f"  {each.ratio:.2f} of weights and KV pool, {each.own:.2f} without pages of files")


def int8_weights(session: Session, *, model: str, dtype: str) -> None:
    """Beside weights in the dtype itself, by the benchmark of the engine alone."""
    for held in ("dtype", "int8"):
        argv = [
            sys.executable,
            str(BENCHMARKS / "cpu_engine.py"),
            "--models",
            model,
            "--dtypes",
            dtype,
            "--rounds",
            "1",
        ]
        output = output_of(
            [*argv, "--threads", str(session.plan.threads), "--quantization", held],
            log=session.log(f"{held}-{model}-{dtype}"),
            limit_s=session.deadline.wait_s(300),
            environment=python_path(),
        )
        figures = msgspec.json.decode(output.splitlines()[-1], type=dict[str, int | float | str])
        each = HeldWeights(
            model=model,
            dtype=dtype,
            held=held,
            decode_ms=float(figures["decode_ms"]),
            decode_share=float(figures["decode_share"]),
            prefill=float(figures["prefill_tokens_per_s"]),
            stage=session.stage,
        )
        session.results.held.append(each)
        CONSOLE.print(f"  {held:<6} {each.decode_ms:.1f} ms per token, prefill {each.prefill:,.0f} tokens/s")


def compare(session: Session, *, comparison: Comparison) -> None:
    """Every workload on every engine, in turn."""
    where = {"model": comparison.model, "dtype": comparison.dtype}
    with session.opened(comparison.engines, session.setting(**where, streams=comparison.streams)) as opened:
        rounds = Rounds(
            engines=[each for each in opened if _warm(session, each, comparison)],
            **where,
            budget_s=session.plan.budget_s,
            deadline=session.deadline,
            on_sample=partial(_add_sample, session),
            failed=session.failed,
        )
        numbers = range(comparison.first_round, comparison.first_round + comparison.rounds)
        if not rounds.play([WORKLOADS[name] for name in comparison.workloads], numbers):
            session.cut(f"not all of {comparison.rounds} rounds of {session.stage}")


def _warm(session: Session, engine: Engine, comparison: Comparison) -> bool:
    engine.resume()
    try:
        with CONSOLE.status(f"warming {engine.name} up"):
            warm_up(engine.run, batch=any(name not in ("single", "prefill") for name in comparison.workloads))
    except PeerError as error:
        session.failed(engine.name, error)
        engine.close()
        return False
    engine.pause()
    return True


def _add_sample(session: Session, sample: Sample) -> None:
    session.results.samples.append(msgspec.structs.replace(sample, stage=session.stage))
    session.keep()
    figures = "  ".join(f"{name} {value:,.4g}" for name, value in sample.figures.items())
    equal = "" if sample.equal is None else f"  equal {sample.equal:.0%}"
    busy = "" if sample.idle else " (the machine was not idle before)"
    line = f"  {sample.workload:<14} {sample.round:>3}  {sample.engine:<16} {figures}{equal}"
    CONSOLE.print(f"{line}  others {sample.others:.0%}{busy}")


def steady_arrivals(session: Session, *, dtype: str) -> None:
    peers = [name for name in ("vllm serve", "llama.cpp") if name.split()[0] in session.plan.peers]
    with session.opened(("tandem mixed", *peers), session.setting(SMALL, dtype, BATCH_STREAMS)) as engines:
        for engine in engines:
            assert isinstance(engine, ServerEngine), "arrivals go to servers"
            if session.deadline.passed:
                session.cut(f"steady arrivals at {engine.name}")
                continue
            try:
                _arrive(session, engine, dtype)
            except PeerError as error:
                session.failed(engine.name, error)
            # Not paused for those after it: `tandem up` cannot be.
            engine.close()


def _arrive(session: Session, engine: ServerEngine, dtype: str) -> None:
    for load in arrivals.at_shares(engine, model=SMALL, dtype=dtype, count=session.plan.arrivals):
        session.results.loads.append(msgspec.structs.replace(load, stage=session.stage))
        session.keep()
        line = f"  {engine.name:<14} {load.rate:.1f} requests/s  TTFT p50 {load.ttft_ms['p50']:.0f} ms"
        CONSOLE.print(f"{line}  ITL p99 {load.itl_ms['p99']:.1f} ms  others {load.others:.0%}")


def decodes_under_prompts(session: Session, *, dtype: str) -> None:
    with session.opened(("tandem mixed", "tandem 1P+1D"), session.setting(SMALL, dtype, BATCH_STREAMS)) as engines:
        servers = [engine for engine in engines if isinstance(engine, ServerEngine)]
        if len(servers) < 2:
            raise PeerError("one of the two sides did not start")
        gap_s = interference.gap_s(servers[0])
        interference.single_prompt_s(servers[1])
        for number in range(session.plan.interference_rounds):
            for server in servers:
                if session.deadline.passed:
                    session.cut(f"round {number + 1} of {session.plan.interference_rounds} of {session.stage}")
                    return
                each = interference.play(server, number, model=SMALL, dtype=dtype, gap_s=gap_s)
                session.results.interference.append(msgspec.structs.replace(each, stage=session.stage))
                session.keep()
                latency = f"ITL p50 {each.itl_ms['p50']:.1f} p99 {each.itl_ms['p99']:.1f} ms"
                rate = f"{each.tokens_per_s:,.0f} tokens/s  others {each.others:.0%}"
                CONSOLE.print(f"  {number:>3}  {server.name:<14} {latency}  {rate}")
