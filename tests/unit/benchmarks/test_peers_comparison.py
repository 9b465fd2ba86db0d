"""The pure parts of `benchmarks/peers`: jobs, plans, ratios, targets and what is written of them."""

import importlib
from itertools import pairwise

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable


@pytest.fixture(scope="module", autouse=True)
def modules():
    """`peers` is a package of scripts: found beside them, and forgotten afterwards."""
    pytest.importorskip("uvicorn")
    with benchmarks_importable():
        yield


def part(name):
    return importlib.import_module(f"peers.{name}")


def sample(engine, number, figures, *, model="q25m", dtype="float32", workload="offline", equal=None):
    return part("rounds").Sample(
        engine=engine,
        model=model,
        dtype=dtype,
        workload=workload,
        round=number,
        figures=figures,
        own=0.9,
        others=0.01,
        idle=True,
        equal=equal,
    )


def results(**more):
    return part("results").Results(
        date="2026-01-01",
        commit="abc",
        threads=2,
        machine={"cpu": "x", "cores": 2, "vectors": "avx2", "memory_gib": 24, "kernel": "6", "python": "3.11"},
        versions={"torch": "2"},
        missing={"sglang": "CUDA only"},
        **more,
    )


def options(*argv):
    return part("__main__").parser().parse_args(argv)


def plan(*argv):
    return part("plan").make_plan(options(*argv))


def test_jobs_are_a_function_of_workload_and_round():
    jobs = part("jobs")
    shape = {"count": 5, "prompt": (64, 512), "output": (64, 128)}
    one, again, other = (jobs.mixed("offline", number, **shape) for number in (3, 3, 4))
    assert one == again
    assert [len(job.prompt) for job in one] == [len(job.prompt) for job in other]
    assert [job.output_len for job in one] == [job.output_len for job in other]
    assert all(a.prompt[:8] != b.prompt[:8] for a, b in zip(one, other, strict=True)), "a cache cannot have seen them"
    assert all(jobs.FIRST_ID <= each < jobs.VOCABULARY for job in one for each in job.prompt)


def test_shared_prefixes_are_shared_within_a_round_alone():
    jobs = part("jobs")
    shape = {"count": 3, "prefix": 16, "own": 4, "output": 1}
    one, other = jobs.shared_prefix(0, **shape), jobs.shared_prefix(1, **shape)
    assert len({job.prompt[:16] for job in one}) == 1
    assert len({job.prompt[16:] for job in one}) == 3
    assert one[0].prompt[:16] != other[0].prompt[:16]


def test_each_turn_includes_generated_text_of_earlier_turns():
    workloads, base = part("workloads"), part("engines.base")
    asked = []

    def run(jobs):
        asked.append([job.prompt for job in jobs])
        return base.Result(seconds=0.5, outputs=tuple((7,) * job.output_len for job in jobs))

    played = workloads.Conversations(count=2, turns=3).play(run, 0)
    assert played.figures == {"conversations": 1.5}
    for before, after in pairwise(asked):
        for prompt, longer in zip(before, after, strict=True):
            assert longer[: len(prompt) + 32] == prompt + (7,) * 32
            assert len(longer) > len(prompt) + 32


def test_stream_of_one_token_is_taken_off_a_single_stream():
    workloads, base = part("workloads"), part("engines.base")
    played = workloads.Single(output=11).play(
        lambda jobs: base.Result(seconds=0.1 + 0.02 * (jobs[0].output_len - 1), outputs=None), 0
    )
    assert played.figures == pytest.approx({"tpot_ms": 20.0, "ttft_ms": 100.0})


def test_ratios_are_medians_of_rounds_that_both_sides_were_in():
    ratios = part("ratios")
    ours = [sample("tandem", number, {"offline": value}) for number, value in enumerate((100.0, 300.0, 120.0))]
    theirs = [sample("vllm", number, {"offline": value}) for number, value in enumerate((50.0, 100.0))]
    assert ratios.speed([*ours, *theirs], "q25m", "float32", "offline", "vllm") == 2.5
    slower = [sample("llama.cpp", 0, {"offline": 20.0}), sample("tandem", 0, {"offline": 100.0})]
    assert ratios.against_best([*ours, *theirs, *slower], "q25m", "float32", "offline") == (2.5, "vllm")


def test_ratio_is_inverted_where_less_is_better():
    ratios = part("ratios")
    both = [sample("tandem", 0, {"tpot_ms": 2.0}), sample("llama.cpp", 0, {"tpot_ms": 5.0})]
    assert ratios.speed(both, "q25m", "float32", "tpot_ms", "llama.cpp") == 2.5


def test_target_is_there_for_every_bound_that_has_figures():
    memory = part("results").Memory(model="q25m", dtype="float32", resident=330, bare=100, weights=100, kv_pool=100)
    loads = part("interference").Interference
    both = [
        loads(
            engine=engine,
            model="q25m",
            dtype="float32",
            round=0,
            gap_s=1.0,
            seconds=10.0,
            tokens_per_s=rate,
            itl_ms={"p50": 1.0, "p99": p99, "max": p99},
            ttft_ms={"p50": 1.0, "max": 1.0},
            others=0.0,
        )
        for engine, rate, p99 in (("tandem mixed", 100.0, 50.0), ("tandem 1P+1D", 95.0, 20.0))
    ]
    figures = {"offline": 100.0, "tpot_ms": 2.0, "prefill": 1000.0, "shared": 1.0}
    halves = {"offline": 50.0, "tpot_ms": 4.0, "prefill": 500.0, "shared": 2.0}
    large = sample("tandem", 0, {"tpot_ms": 100.0, "prefill": 100.0}, model="q500m")
    found = part("targets").targets(
        results(
            limits=part("limits").Limits(memory_gb_s=30.0, gflops={"float32": 180.0, "bfloat16": 400.0}),
            samples=[
                sample("tandem", 0, figures),
                *(sample(peer, 0, halves) for peer in ("transformers", "transformers CB")),
                sample("vllm", 0, {**halves, "shared": 1.6}),
                sample("tandem 1P+1D", 0, {"offline": 90.0, "tpot_ms": 3.0}),
                sample("vllm 1P+1D", 0, {"offline": 20.0, "tpot_ms": 6.0}),
                large,
            ],
            interference=both,
            memory=[memory],
            startup=part("results").StartupTimes(ready_s=7.0, help_s=0.4, parts={}),
        )
    )
    reported = {target.name: (round(target.ratio, 3), target.met) for target in found if target.ratio is not None}
    assert reported["offline over transformers generate, q25m float32"] == (2.0, False)
    assert reported["single stream over transformers continuous batching, q25m float32"] == (2.0, True)
    assert reported["shared prefix over the best engine (vllm), q25m float32"] == (1.6, True)
    assert reported["1P+1D offline over vLLM's over NIXL, q25m float32"] == (4.5, True)
    assert reported["1P+1D time per token over vLLM's over NIXL, q25m float32"] == (0.5, False)
    assert reported["ITL p99, 1P+1D over one mixed worker under arriving prompts, q25m float32"] == (0.4, True)
    assert reported["throughput, 1P+1D over one mixed worker under arriving prompts, q25m float32"] == (0.95, True)
    assert reported["memory over weights and KV pool, q25m float32"] == (1.15, True)
    assert reported["tandem --help, s"] == (0.4, False)
    assert {name for name in reported if "q500m" in name} == {
        "share of bandwidth in decode, q500m float32",
        "share of GEMM rate in prefill, q500m float32",
    }
    # 500M parameters of 4 bytes in 0.1 s are 20 GB/s of 30.
    assert reported["share of bandwidth in decode, q500m float32"][0] == pytest.approx(0.67, abs=0.05)


def test_models_have_parameter_counts_of_their_names():
    shapes = part("shapes").SHAPES
    assert {name: round(shape.parameters / 1e6) for name, shape in shapes.items()} == {
        "q25m": 25,
        "q125m": 123,
        "q500m": 503,
    }


def test_default_plan_is_small_where_models_are_large():
    made = plan()
    small = [each for each in made.comparisons if each.model == "q25m"]
    large = [each for each in made.comparisons if each.model == "q500m"]
    assert {name for each in small for name in each.workloads} == set(part("workloads").WORKLOADS)
    assert {each.workloads for each in large} == {("single", "prefill")}
    assert {each.streams for each in large} == {4}
    assert {each.dtype for each in made.comparisons} == {"float32", "bfloat16"}
    assert made.served_dtypes == ("float32",)


def test_comparison_plan_contains_only_requested_jobs():
    made = plan("--only", "single", "--models", "q500m", "--peers", "vllm", "--dtypes", "bfloat16", "--rounds", "2")
    (only,) = made.comparisons
    assert (only.model, only.dtype, only.engines, only.workloads) == (
        "q500m",
        "bfloat16",
        ("tandem", "vllm"),
        ("single",),
    )
    assert only.rounds == 2
    assert made.served_dtypes == ()
    assert plan("--only", "startup").comparisons == ()


def test_only_peers_that_a_part_needs_are_installed():
    assert plan("--only", "interference").wanted_peers == set()
    assert plan("--only", "disaggregated").wanted_peers == {"vllm"}
    assert plan("--only", "arrivals", "--peers", "llama.cpp").wanted_peers == {"llama.cpp"}
    assert plan().wanted_peers == set(part("plan").PEERS)


def test_unknown_part_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        options("--only", "offlin")
    assert "'offlin' is none of offline, single" in capsys.readouterr().err


def test_events_are_timed_by_their_last_byte():
    streams = part("streams")
    chunks = [
        (1.0, b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choi'),
        (2.0, b'ces": [{"text": ""}]}\n\n'),
        (3.0, b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'),
    ]
    stream = streams.read_stream(0.5, chunks, 3.0)
    assert stream.times == (1.0, 2.0)
    assert (stream.ttft, stream.gaps, stream.tokens) == (0.5, [1.0], 2)
    with pytest.raises(part("processes").PeerError, match="ended early"):
        streams.read_stream(0.5, chunks[:2], 3.0)


def test_answer_of_another_length_is_an_error():
    base, jobs = part("engines.base"), part("jobs")
    with pytest.raises(part("processes").PeerError, match="job 0: 3 tokens instead of 4"):
        base.require_lengths("x", [jobs.Job(prompt=(1,), output_len=4)], [3])


def test_tables_replace_only_the_text_between_markers():
    docs = part("docs")
    page = f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n"
    once = docs.replaced(page, "| new |\n")
    assert once == f"before\n{docs.BEGIN}\n\n| new |\n\n{docs.END}\nafter\n"
    assert docs.replaced(once, "| new |") == once
    with pytest.raises(ValueError, match="has no line"):
        docs.replaced("nothing", "| new |")


def test_report_lists_missed_targets_and_absent_engines(tmp_path):
    report, written = part("report"), part("results")
    found = results(samples=[sample("tandem", 0, {"offline": 100.0}), sample("vllm", 0, {"offline": 80.0}, equal=0.5)])
    text = report.markdown(found)
    assert "| *times faster than vllm* | **1.25** |" in text
    assert "| 1.25 | ≥ 1.3 | missed by 4% |" in text
    assert "50.0%" in text
    assert "- sglang is not there: CUDA only." in text
    report.plot(found, tmp_path / "ratios.svg")
    assert "1.25" in (tmp_path / "ratios.svg").read_text()
    written.write(found, tmp_path / "r.json")
    assert written.read(tmp_path / "r.json") == found


def test_last_line_of_a_run_lists_every_target():
    found = results(samples=[sample("tandem", 0, {"offline": 90.0}), sample("vllm", 0, {"offline": 60.0})])
    reported = {target["name"]: target for target in part("__main__").summary(found)["targets"]}
    best = reported.pop("offline over the best engine (vllm), q25m float32")
    assert {key: best[key] for key in ("ratio", "target", "met")} == {"ratio": 1.5, "target": 1.3, "met": True}
    assert {(each["ratio"], each["met"], each["reason"]) for each in reported.values()} == {
        (None, False, "this run was not asked for it"),
        (None, False, "the limits of the machine were not measured"),
    }
    assert set(reported) >= {
        "single stream over transformers continuous batching, q25m float32",
        "shared prefix over the best engine, q25m bfloat16",
        "1P+1D offline over vLLM's over NIXL, q25m float32",
        "1P+1D time per token over vLLM's over NIXL, q25m float32",
        "ITL p99, 1P+1D over one mixed worker under arriving prompts, q25m float32",
        "throughput, 1P+1D over one mixed worker under arriving prompts, q25m float32",
        "share of bandwidth in decode, q500m bfloat16",
        "share of GEMM rate in prefill, q500m float32",
        "memory over weights and KV pool, q500m float32",
        "tandem up ready, s",
        "tandem --help, s",
    }


def test_target_without_measurements_names_the_failure():
    report, targets = part("results").StageReport, part("targets")
    times = {"seconds": 1.0, "allotted_s": 9.0}
    stages = [
        report(name="q25m float32 disaggregated", notes=["vllm 1P+1D: ended with status 1"], **times),
        report(name="start-up", notes=["cut: no time was left for it"], **times),
    ]
    found = results(stages=stages, samples=[sample("tandem 1P+1D", 0, {"offline": 9.0})])
    reported = {target.name: target for target in targets.targets(found)}
    peer = reported["1P+1D offline over vLLM's over NIXL, q25m float32"]
    assert (peer.ratio, peer.met) == (None, False)
    assert peer.reason == "vllm 1P+1D: ended with status 1"
    assert reported["tandem up ready, s"].reason == "cut: no time was left for it"
    found.missing["vllm"] = "no disk"
    assert {target.reason for target in targets.targets(found) if target.name == peer.name} == {
        "vllm is not there: no disk"
    }
    assert f"not measured: {peer.reason}" in part("report").markdown(results(stages=stages))
