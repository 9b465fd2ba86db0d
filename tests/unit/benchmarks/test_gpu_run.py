"""Parts of a GPU run in processes that are killed, hang, crash or have no time, and a run that is called again."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_testing.benchmark_modules import BENCHMARKS, benchmarks_importable
from tandem_testing.waiting import wait_for

with benchmarks_importable():
    from gpu import __main__ as command
    from gpu.control import child, folder, lines
    from gpu.control.needs import memory, modules, tool
    from gpu.control.parts import PARTS, Part, named
    from gpu.control.report import Report
    from gpu.control.runner import Runner
    from gpu.control.state import State, Status

ROOT = BENCHMARKS.parent
CASES = f"""
import os, signal, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
from gpu.control.lines import Begin, End, LineFile, Machine, ended
file = LineFile(Path(sys.argv[1]))
done = ended(file.read(), "p")
file.write(Machine(part="p", facts={{}}))
for case in "abc":
    if case not in done:
        file.write(Begin(part="p", case=case))
        if case == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(End(part="p", case=case, seconds=0.0))
"""


def part(name="p", *, seconds=600.0):
    return Part(name=name, seconds=seconds, run="no.module")


def runner(out, program, *, minutes=60.0):
    """Every part runs `program`, with the folder as its argument."""
    return Runner(
        out=out,
        ends_at=time.monotonic() + 60 * minutes,
        command=lambda *_: [sys.executable, "-c", program, str(out)],
    )


def status(state, name="p"):
    return state.parts[name].status


def test_process_killed_in_a_case_costs_that_case(tmp_path):
    state = runner(tmp_path, CASES).run([part()])
    assert status(state) is Status.DONE
    read = lines.LineFile(tmp_path).read()
    assert lines.ended(read, "p") == {"a", "b", "c"}
    (missing,) = [line for line in read if isinstance(line, lines.Missing)]
    assert (missing.case, missing.why) == ("b", "the process ended with status -9")
    assert Report(tmp_path).failures == ["p: b"]


def test_resumed_gpu_run_executes_remaining_parts(tmp_path):
    first = runner(tmp_path, "pass").run([part("p")])
    assert status(first) is Status.DONE
    ran = tmp_path / "ran"
    second = runner(tmp_path, f"open({str(ran)!r}, 'a').write('x')").run([part("p"), part("q")])
    assert (status(second, "p"), status(second, "q")) == (Status.DONE, Status.DONE)
    assert ran.read_text() == "x"
    assert State.read(tmp_path) == second


def test_part_that_a_kill_left_running_is_run_again(tmp_path):
    state = State()
    unfinished = runner(tmp_path, "pass")
    unfinished._is(part(), Status.RUNNING)
    assert status(State.read(tmp_path)) is Status.RUNNING
    state = runner(tmp_path, "pass").run([part()])
    assert status(state) is Status.DONE


def test_part_that_hangs_is_ended_at_its_limit(tmp_path):
    lines.LineFile(tmp_path).write(lines.Begin(part="p", case="a"))
    state = runner(tmp_path, "import time; time.sleep(1000)").run([part(seconds=1.0)])
    assert status(state) is Status.HUNG
    assert lines.ended(lines.LineFile(tmp_path).read(), "p") == {"a"}
    assert "no end within the part's 1 s" in Report(tmp_path).table()
    assert "p: hung" in Report(tmp_path).failures


def test_rehearsal_has_more_time_than_a_device(tmp_path):
    rehearsal = replace(runner(tmp_path, "import time; time.sleep(1.5)"), dry_run=True)
    assert status(rehearsal.run([part(seconds=1.0)])) is Status.DONE


def test_case_cut_off_by_the_runs_end_is_done_again(tmp_path):
    lines.LineFile(tmp_path).write(lines.Begin(part="p", case="a"))
    run = runner(tmp_path, "import time; time.sleep(1000)")
    run.ends_at = time.monotonic() + 1.0
    assert run._run(part()) == (Status.LEFT, "the run's time was over")
    assert not lines.ended(lines.LineFile(tmp_path).read(), "p")


def test_part_that_crashes_does_not_cost_the_next(tmp_path):
    program = "import sys; sys.exit(7)"
    state = runner(tmp_path, program).run([part("p"), part("q")])
    assert [status(state, name) for name in "pq"] == [Status.CRASHED] * 2
    assert state.parts["p"].why == "its process ended with status 7 outside of its cases"


def test_part_that_loses_its_device_is_started_again(tmp_path):
    marker = tmp_path / "once"
    program = f"""
import pathlib, sys
once = pathlib.Path({str(marker)!r})
if not once.exists():
    once.touch()
    sys.exit({child.LOST})
"""
    assert status(runner(tmp_path, program).run([part()])) is Status.DONE


@pytest.mark.parametrize(("code", "expected"), [(child.LEFT, Status.LEFT), (child.SKIPPED, Status.SKIPPED)])
def test_gpu_run_part_status_reflects_exit_code(tmp_path, code, expected):
    assert status(runner(tmp_path, f"raise SystemExit({code})").run([part()])) is expected


def test_part_that_no_time_is_left_for_is_not_started(tmp_path):
    state = runner(tmp_path, "raise SystemExit(7)", minutes=0.1).run([part()])
    assert status(state) is Status.NO_TIME


def test_child_processes_of_a_part_end_with_it(tmp_path):
    pid = tmp_path / "pid"
    program = f"""
import pathlib, subprocess
pathlib.Path({str(pid)!r}).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
"""
    runner(tmp_path, program).run([part()])
    stat = Path(f"/proc/{pid.read_text()}/stat")
    wait_for(lambda: not stat.exists() or ") Z" in stat.read_text(), 60)


def test_output_of_parts_is_logged_up_to_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_BYTES", 400)
    runner(tmp_path, "print('x' * 1000)").run([part()])
    assert (tmp_path / folder.LOG).stat().st_size == 400
    folder.check(tmp_path)


def test_folder_that_cannot_be_carried_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_BYTES", 4)
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(folder.FolderError, match="large has 5 bytes"):
        folder.check(tmp_path)
    for number in range(9):
        (tmp_path / str(number)).touch()
    with pytest.raises(folder.FolderError, match="has 10 files"):
        folder.check(tmp_path)


def test_parts_are_in_the_order_of_their_worth():
    assert [one.name for one in named("tests-rest,probe,engine-8b")] == ["probe", "engine-8b", "tests-rest"]
    assert all(one.seconds < 600 for one in PARTS)
    with pytest.raises(ValueError, match="must name some of probe, engine-latents"):
        named("kernel")


def test_missing_tools_of_a_machine_are_named():
    assert "no not_a_module here" in modules("json", "not_a_module")()
    assert modules("json")() is None
    assert tool("not-a-tool")() == "no not-a-tool here"
    assert tool("sh")() is None


def test_memory_is_no_question_without_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert memory(1e6)() is None


def test_part_that_lacks_something_is_skipped_with_the_reason(tmp_path, monkeypatch):
    lacking = Part(name="p", seconds=1.0, run="no.module", needs=(modules("not_a_module"),))
    monkeypatch.setattr(child, "PARTS", (lacking,))
    assert child.main(["p", "--out", str(tmp_path), "--seconds", "1"]) == child.SKIPPED
    (missing,) = lines.LineFile(tmp_path).read()
    assert "not_a_module" in missing.why
    assert not Report(tmp_path).failures


def test_gpu_run_without_device_reports_it_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == command.NO_DEVICE
    assert not (tmp_path / "out").exists()


def test_unknown_part_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        command.main(["--part", "kernel"])
    assert "must name some of probe, engine-latents, engine-states, kernels" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_make_gpu_runs_the_parts_with_the_given_interpreter(tmp_path, code):
    """One that takes down what it is to run."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >>{log}\ncase "$*" in -c*) exit 0 ;; *) exit {code} ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "tools/gpu.sh"), "--part", "kernels"],
        env={**os.environ, "TANDEM_PYTHON": str(python)},
        check=False,
    )
    assert done.returncode == code
    assert log.read_text().splitlines()[-1] == "-m gpu --part kernels"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_runner_leaves_no_part_running(tmp_path, number):
    """By SIGTERM it ends what the part has started, too; a killed one can end nothing, but the part ends with it."""
    marker = tmp_path / "pid"
    part_code = f"import os, pathlib, time; pathlib.Path({str(marker)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        f"import signal, sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from pathlib import Path\n"
        "from gpu.control.parts import Part\nfrom gpu.control.runner import Runner\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"Runner(out=Path({str(tmp_path)!r}), ends_at=time.monotonic() + 600,"
        f" command=lambda *_: [sys.executable, '-c', {part_code!r}]).run([Part(name='p', seconds=600.0, run='no')])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: marker.is_file() and marker.read_text(), 60)
        process.send_signal(number)
        process.wait(60)
        wait_for(lambda: not Path("/proc", marker.read_text()).exists(), 60)
    finally:
        process.kill()
        process.wait()


def test_report_names_kernels_that_a_part_compiled(tmp_path):
    """Those that Triton's cache, of a kit or an earlier part, had not got."""

    def has(key, name):
        (tmp_path / "cache" / key).mkdir(parents=True)
        (tmp_path / "cache" / key / f"__grp__{name}.json").touch()

    has("A", "of_the_kit")
    program = f"import pathlib; made = pathlib.Path({str(tmp_path / 'cache' / 'B')!r}); made.mkdir(); "
    program += "(made / '__grp__draw_kernel.json').touch(); (made / 'draw_kernel.json').touch()"
    for name, run in (("probe", program), ("kernels", "pass")):
        part_runner = replace(runner(tmp_path / "out", run), kernels=tmp_path / "cache")
        assert status(part_runner.run([part(name)]), name) is Status.DONE
    probe, kernels = (line for line in lines.LineFile(tmp_path / "out").read() if isinstance(line, lines.Compiled))
    assert (probe.kernels, kernels.kernels) == (["draw_kernel"], [])
    assert "| 1 (draw_kernel) |" in Report(tmp_path / "out").table()
    assert "kernels: kernels compiled: 0" in (tmp_path / "out" / folder.LOG).read_text()
