"""A comparison ends in time and loses nothing: shares of stages, rounds that are cut, engines that fail, resumption."""

import importlib

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable


@pytest.fixture(scope="module", autouse=True)
def modules():
    pytest.importorskip("uvicorn")
    with benchmarks_importable():
        yield


def part(name):
    return importlib.import_module(f"peers.{name}")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def deadline(clock, at=100.0):
    return part("time_limit").Deadline(at=at, answer_s=50.0, clock=clock)


def test_unused_time_of_a_stage_goes_to_later_stages(clock):
    limit = part("time_limit").TimeLimit(ends=100.0, answer_s=50.0, clock=clock)
    assert limit.stage(10.0, later=30.0).left == 25.0
    clock.now = 4.0
    assert limit.stage(10.0, later=20.0).left == 32.0
    clock.now = 90.0
    assert limit.stage(20.0, later=0.0).left == 10.0
    clock.now = 120.0
    assert limit.stage(20.0, later=5.0).passed


def test_no_answer_is_waited_for_longer_than_the_stage_has(clock):
    time_limit = part("time_limit")
    each = deadline(clock)
    assert (each.wait_s(), each.wait_s(20.0)) == (50.0, 20.0)
    clock.now = 90.0
    assert each.wait_s() == 10.0 + time_limit.GRACE_S
    clock.now = 1000.0
    assert each.passed
    assert each.wait_s() == time_limit.MIN_S


class Played:
    """Implements `Engine`: answers each job with its length, after seconds of the clock; fails from some figure on."""

    pids = ()

    def __init__(self, name, clock, seconds=1.0, fails_after=99):
        self.name, self._clock, self._seconds, self._left = name, clock, seconds, fails_after
        self.closed = False

    def run(self, jobs):
        self._left -= 1
        if self._left < 0:
            raise part("processes").PeerError(f"{self.name} hangs:\n its log")
        self._clock.now += self._seconds
        return part("engines.base").Result(seconds=self._seconds, outputs=tuple((1,) * j.output_len for j in jobs))

    def pause(self):
        pass

    def resume(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(part("rounds"), "wait_until_idle", lambda: True)


def rounds(engines, clock, *, at=100.0, budget_s=30.0):
    samples, failed = [], []
    made = part("rounds").Rounds(
        engines=list(engines),
        model="q25m",
        dtype="float32",
        budget_s=budget_s,
        deadline=deadline(clock, at),
        on_sample=samples.append,
        failed=lambda name, error: failed.append((name, str(error))),
    )
    return made, samples, failed


def workloads(*names):
    return [part("workloads").WORKLOADS[name] for name in names]


def test_time_that_runs_out_takes_rounds_and_not_workloads(clock, idle):
    made, samples, _ = rounds([Played("tandem", clock), Played("vllm", clock)], clock, at=5.5)
    assert not made.play(workloads("offline", "prefill"), range(3))
    assert [(each.workload, each.round, each.engine) for each in samples] == [
        ("offline", 0, "tandem"),
        ("offline", 0, "vllm"),
        ("prefill", 0, "tandem"),
        ("prefill", 0, "vllm"),
        ("offline", 1, "tandem"),
        ("offline", 1, "vllm"),
    ]


def test_failing_engine_is_closed_and_others_continue(clock, idle):
    bad = Played("vllm", clock, fails_after=1)
    made, samples, failed = rounds([Played("tandem", clock), bad], clock)
    assert made.play(workloads("offline"), range(3))
    assert [each.engine for each in samples] == ["tandem", "vllm", "tandem", "tandem"]
    assert [name for name, _ in failed] == ["vllm"]
    assert bad.closed


def session(tmp_path, **more):
    plan = part("plan").make_plan(part("__main__").parser().parse_args(["--only", "startup"]))
    found = part("session").new_results(plan, {})
    return part("session").Session(plan=plan, home=tmp_path, results=found, out=tmp_path / "r.json", **more)


def stage(name, run, weight_s=1.0):
    return part("session").Stage(name=name, weight_s=weight_s, run=run)


def limit(clock):
    return part("time_limit").TimeLimit(ends=100.0, answer_s=50.0, clock=clock)


def fail(_):
    raise part("processes").PeerError("tandem did not answer:\n  its log")


def test_failed_or_skipped_stage_is_noted_and_others_run(clock, tmp_path):
    def late(_):
        clock.now = 101.0

    made = session(tmp_path)
    made.run([stage("a", fail), stage("b", late), stage("c", fail)], limit(clock))
    assert [(each.name, each.notes) for each in made.results.stages] == [
        ("a", ["a: tandem did not answer"]),
        ("b", []),
        ("c", ["cut: no time was left for it"]),
    ]
    assert part("results").read(tmp_path / "r.json") == made.results


def test_results_are_written_when_a_run_is_interrupted(clock, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    made = session(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        made.run([stage("a", lambda _: None), stage("b", interrupt)], limit(clock))
    written = part("results").read(tmp_path / "r.json")
    assert [(each.name, each.notes) for each in written.stages] == [("a", []), ("b", ["cut: interrupted"])]


def test_resumed_comparison_repeats_only_incomplete_stages(clock, tmp_path):
    sample = part("rounds").Sample(
        engine="tandem",
        model="q25m",
        dtype="float32",
        workload="offline",
        round=0,
        figures={"offline": 1.0},
        own=0.9,
        others=0.0,
        idle=True,
    )

    def measured(each):
        each.results.samples.append(part("rounds").msgspec.structs.replace(sample, stage=each.stage))

    def half(each):
        measured(each)
        each.cut("not all of 3 rounds")

    made = session(tmp_path)
    made.run([stage("a", measured), stage("b", half)], limit(clock))
    kept = part("results").complete_part(made.results)
    assert [each.stage for each in kept.samples] == ["a"]
    again = session(tmp_path)
    again.results = kept
    again.run([stage("a", fail), stage("b", measured)], limit(clock))
    assert [each.stage for each in again.results.samples] == ["a", "b"]
    assert all(each.complete for each in again.results.stages)


def test_results_of_other_code_are_not_resumed(tmp_path):
    main, results = part("__main__"), part("results")
    options = main.parser().parse_args(["--resume", "--out", str(tmp_path / "r.json")])
    plan = part("plan").make_plan(options)
    assert main.earlier(options, plan) is None
    found = part("session").new_results(plan, {})
    results.write(found, options.out)
    assert main.earlier(options, plan) == found
    found.commit = "another"
    results.write(found, options.out)
    with pytest.raises(part("processes").PeerError, match="leave --resume out"):
        main.earlier(options, plan)


def test_engine_failing_to_start_twice_is_not_retried(clock, tmp_path, monkeypatch):
    tried = []

    def refuse(name, _):
        tried.append(name)
        raise part("processes").PeerError("no room")

    monkeypatch.setattr(part("session"), "open_engine", refuse)
    made = session(tmp_path, deadline=deadline(clock))
    for _ in range(3):
        with made.opened(["vllm"], made.setting("q25m", "float32", 4)) as engines:
            assert engines == []
    assert tried == ["vllm", "vllm"]


def test_default_run_is_planned_for_less_than_33_minutes():
    main, stages = part("__main__"), part("stages")
    options = main.parser().parse_args([])
    planned = stages.stages_of(part("plan").make_plan(options))
    assert len({each.name for each in planned}) == len(planned)
    assert sum(each.weight_s for each in planned) < 33 * 60


def test_process_that_takes_too_long_is_ended(tmp_path):
    processes = part("processes")
    assert processes.output_of(["echo", "a"], log=tmp_path / "quick.log", limit_s=30.0) == b"a\n"
    with pytest.raises(processes.PeerError, match="slow took longer than 0 s"):
        processes.output_of(["sleep", "60"], log=tmp_path / "slow.log", limit_s=0.05)
    with pytest.raises(processes.PeerError, match="bad ended with status 1"):
        processes.output_of(["false"], log=tmp_path / "bad.log", limit_s=30.0)


def test_hanging_install_step_is_ended_and_peer_skipped(tmp_path, monkeypatch):
    steps, peers = part("install.steps"), part("install.peers")
    monkeypatch.setattr(steps, "LIMIT_S", 0.05)
    monkeypatch.setitem(
        peers.INSTALLERS, "vllm", lambda home: steps.command(["sleep", "60"], title="a wheel", log=home / "log")
    )
    missing = peers.install(["vllm"], tmp_path)
    assert missing["vllm"].startswith("a wheel took longer than 0 s")
