"""The processes of `tandem up`: reports of their ends, when they restart, and in which order they stop."""

import errno
import os
import sys
from pathlib import Path
from subprocess import SubprocessError
from types import CodeType

import pytest

import tandem_services.cli
from tandem_engine.base.errors import ConfigError
from tandem_services.cli import processes
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.common.errors import StartupError
from tandem_testing.raised_anywhere import Fault, name_of, raising, recorded
from tandem_testing.waiting import wait_for

FOLDER = Path(tandem_services.cli.__file__).parent
UP_S = 60.0
HOURS_S = 36000.0


def failing(number):
    """A call that the kernel rejects."""

    def call(*args, **flags):
        raise OSError(number, os.strerror(number))

    return call


def test_child_that_exits_at_start_shows_end_of_its_output(tmp_path) -> None:
    supervisor = Supervisor()
    code = "import sys; print('cannot find my shoes'); sys.exit(3)"
    supervisor.start(Child(name="walker", argv=[sys.executable, "-c", code], log=tmp_path / "walker.log"))
    supervisor.children[0].process.wait(20)
    with pytest.raises(StartupError, match=r"walker exited with status 3(.|\n)*cannot find my shoes"):
        supervisor.require_alive()
    supervisor.stop(grace=1)


def test_flag_that_a_child_refuses_is_wrong_usage(tmp_path) -> None:
    supervisor = Supervisor()
    code = "import sys; print('tandem: error: --cluster must be letters', file=sys.stderr); sys.exit(2)"
    supervisor.start(Child(name="walker", argv=[sys.executable, "-c", code], log=tmp_path / "walker.log"))
    supervisor.children[0].process.wait(20)
    with pytest.raises(ConfigError, match="walker exited with status 2 while starting: --cluster must be letters"):
        supervisor.require_alive()
    supervisor.stop(grace=1)


def test_exited_child_is_restarted_after_backoff_and_stopped(tmp_path) -> None:
    supervisor = Supervisor()
    child = Child(name="sleeper", argv=[sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log")
    supervisor.start(child)
    child.process.kill()
    child.process.wait(20)
    assert "killed by SIGKILL; restarting in 1 s" in supervisor.restart_dead()[0]
    child.restart_at += HOURS_S
    assert supervisor.restart_dead() == []
    child.restart_at = 0.0
    supervisor.wait(HOURS_S)
    assert supervisor.restart_dead() == ["sleeper restarted"]
    assert child.status is None
    supervisor.wait(0.0)
    child.process.kill()
    supervisor.wait(HOURS_S)
    assert child.status is not None
    supervisor.stop(grace=5)
    assert child.status is not None


def test_child_that_cannot_be_started_again_is_tried_later(tmp_path, monkeypatch) -> None:
    supervisor = Supervisor()
    child = Child(name="sleeper", argv=[sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log")
    supervisor.start(child)
    child.process.kill()
    child.process.wait(UP_S)
    supervisor.restart_dead()
    child.restart_at = 0.0
    with monkeypatch.context() as full:
        full.setattr(processes.subprocess, "Popen", failing(errno.EAGAIN))
        (event,) = supervisor.restart_dead()
    assert event == f"sleeper cannot be started ({os.strerror(errno.EAGAIN)}); trying again in 2 s"
    assert supervisor.restart_dead() == []
    child.restart_at = 0.0
    assert supervisor.restart_dead() == ["sleeper restarted"]
    supervisor.stop(grace=0)


def test_child_that_cannot_be_started_keeps_no_other_from_it(tmp_path, monkeypatch) -> None:
    """Also where the reason is no error of the kernel, as after a failed call between fork and exec."""
    supervisor, real = Supervisor(), processes.subprocess.Popen
    for name in ("first", "second"):
        argv = [sys.executable, "-c", "import time; time.sleep(60)"]
        supervisor.start(Child(name=name, argv=argv, log=tmp_path / name))
    first, second = supervisor.children
    for child in supervisor.children:
        child.process.kill()
        child.process.wait(UP_S)
    supervisor.restart_dead()
    first.restart_at = second.restart_at = 0.0
    raised = []

    def failing_once(*args, **flags):
        if not raised:
            raised.append(SubprocessError("Exception occurred in preexec_fn."))
            raise raised[0]
        return real(*args, **flags)

    monkeypatch.setattr(processes.subprocess, "Popen", failing_once)
    reported, done = supervisor.restart_dead()
    assert reported == "first cannot be started (Exception occurred in preexec_fn.); trying again in 2 s"
    assert done == "second restarted"
    first.restart_at = 0.0
    assert supervisor.restart_dead() == ["first restarted"]
    supervisor.stop(grace=0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_wait_without_descriptors_of_processes_is_short(tmp_path, monkeypatch, number) -> None:
    monkeypatch.setattr(processes.os, "pidfd_open", failing(number))
    supervisor = Supervisor()
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    supervisor.start(Child(name="sleeper", argv=argv, log=tmp_path / "log"))
    supervisor.wait(HOURS_S)
    assert supervisor.children[0].status is None
    supervisor.stop(grace=0)


def test_kill_for_memory_explains_the_children_of_that_moment(tmp_path, monkeypatch) -> None:
    counts = iter([0, 2, 3, 3])
    monkeypatch.setattr(processes, "memory_kills", lambda: next(counts))
    monkeypatch.setattr(processes, "memory_shortage", lambda: "memory was short")
    supervisor = Supervisor(memory_kills=processes.memory_kills())
    kill, leave = (f"import os; {end}" for end in ("os.kill(os.getpid(), 9)", "os._exit(1)"))

    def messages(*codes: str) -> list[str]:
        supervisor.children = [
            Child(name=f"c{number}", argv=[sys.executable, "-c", code], log=tmp_path / "log")
            for number, code in enumerate(codes)
        ]
        for child in supervisor.children:
            child.start()
            child.process.wait(20)
        return [event.partition(";")[0] for event in supervisor.restart_dead()]

    for_memory = "was killed by the kernel because memory was short"
    assert messages(kill, kill) == [f"c0 {for_memory}", f"c1 {for_memory}"]
    # The kernel killed the engine of this one.
    assert messages(leave) == ["c0 exited with status 1"]
    assert messages(kill) == ["c0 was killed by SIGKILL"]


TOLD_TO_END = """
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
pathlib.Path({up!r}).touch()
signal.sigwait([signal.SIGTERM])
"""
"""Blocked and waited for: `signal.pause` waits for the next one when the first comes right before it."""


def test_dependencies_are_stopped_last(tmp_path) -> None:
    gone, up = tmp_path / "gone", {name: tmp_path / f"up-{name}" for name in ("last", "first")}
    endings = {
        "last": f"sys.exit(0 if pathlib.Path({str(gone)!r}).exists() else 9)",
        "first": f"time.sleep(0.3); pathlib.Path({str(gone)!r}).touch()",
    }
    supervisor = Supervisor()
    for name, ending in endings.items():
        argv = [sys.executable, "-c", TOLD_TO_END.format(up=str(up[name])) + ending]
        supervisor.start(Child(name=name, argv=argv, log=tmp_path / name, outlives_others=name == "last"))
    wait_for(lambda: all(path.exists() for path in up.values()), UP_S)
    supervisor.stop(grace=UP_S)
    assert [child.status for child in supervisor.children] == [0, 0]


class ServedLongEnough(BaseException):
    """Ends `keep_serving`, as a signal does."""


def test_exception_in_any_function_ends_no_supervision(tmp_path) -> None:
    """Each function that watches and restarts raises once; the child that died then is started again all the same."""
    supervisor = Supervisor()
    argv = [sys.executable, "-c", f"open({str(tmp_path / 'pids')!r}, 'a').write('x\\n'); import time; time.sleep(600)"]
    child = Child(name="sleeper", argv=argv, log=tmp_path / "log")
    supervisor.start(child)
    deaths = 0

    def report(event: str) -> None:
        if event.endswith("restarted"):
            raise ServedLongEnough

    def die_and_serve() -> None:
        nonlocal deaths
        wait_for(lambda: (tmp_path / "pids").exists() and lines() == deaths + 1, UP_S, lambda: str(lines()))
        child.process.kill()
        child.pause, deaths = 0.01, deaths + 1
        with pytest.raises(ServedLongEnough):
            supervisor.keep_serving(report, look_s=0.05)
        assert child.status is None

    def lines() -> int:
        return (tmp_path / "pids").read_text().count("x")

    with recorded(FOLDER) as seen:
        die_and_serve()
    codes: list[CodeType] = [code for code in seen if code.co_name not in {"keep_serving", "report"}]
    assert {"restart_dead", "_restart", "start", "wait"} <= {code.co_name for code in codes}
    for code in codes:
        with raising(Fault(code=code)) as fault:
            die_and_serve()
        assert fault.fell, name_of(code)
    supervisor.stop(grace=5)
