"""`tandem ps` and `tandem stop`: what they find in run directories, and which process gets a signal."""

import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem_services.cli.main import main
from tandem_services.cli.processes import Identity
from tandem_services.cli.run_dir import RUN_FILE, Run, StartedProcess, prepare_run_dir, read_run, record_run
from tandem_services.common.errors import StartupError

UP_S = 60.0


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tandem"


@pytest.fixture
def started():
    """Starts processes that sleep."""
    processes = []

    def start() -> "subprocess.Popen[bytes]":
        # It prints once it has its own command line.
        code = "import time; print(flush=True); time.sleep(1000)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def record(folder, identity: Identity, port: int = 8000, health_port: int = 4242) -> None:
    prepare_run_dir(folder, files=["keys.json"], logs=["gateway.log"])
    record_run(
        folder,
        Run(
            up=identity,
            version="1.2.3",
            model="mini",
            model_path="/models/mini",
            port=port,
            url=f"http://127.0.0.1:{port}",
            processes=(
                StartedProcess(name="redis", pid=75),
                StartedProcess(name="decode-0", pid=77, role="decode", health_port=health_port),
                StartedProcess(name="gateway", pid=79),
            ),
        ),
    )


def identity_of(process) -> Identity:
    found = Identity.of(process.pid)
    assert found is not None
    return found


@pytest.fixture
def loading():
    """The port of a worker whose engine loads its model."""

    class Loads(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"reasons": ["engine: loading the model (kernels 7 of 16)"]}).encode()
            self.send_response(503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Loads) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_ps_lists_url_model_and_state_of_processes(state, started, loading, capsys):
    process = started()
    record(state / "8000", identity_of(process), 1, health_port=loading)
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"http://127.0.0.1:1  mini  tandem 1.2.3  pid {process.pid}  {state / '8000'}",
        "  redis        pid 75",
        f"  decode-0     pid 77  health port {loading}  engine: loading the model (kernels 7 of 16)",
        "  gateway      pid 79  does not answer",
    ]


def test_ps_without_runs_lists_nothing(state, capsys):
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == ""


def test_stop_ends_the_only_one_that_runs(state, started, capsys):
    process = started()
    record(state / "8000", identity_of(process))
    assert main(["stop"]) == 0
    assert process.wait(UP_S) == -15
    assert "stopped http://127.0.0.1:8000" in capsys.readouterr().out
    assert main(["stop"]) == 1


def test_stop_by_port_leaves_the_other_running(state, started, capsys):
    first, second = started(), started()
    record(state / "8000", identity_of(first), 8000)
    record(state / "9000", identity_of(second), 9000)
    assert main(["stop"]) == 2
    assert "several run, on ports 8000, 9000: name one" in capsys.readouterr().err
    assert main(["stop", "9000"]) == 0
    assert second.wait(UP_S) == -15
    assert first.poll() is None
    assert main(["stop", "9000"]) == 1


@pytest.mark.parametrize(
    "changed", [{"started": 1}, {"command": "0" * 64}, {"boot": "another"}], ids=["start time", "command", "boot"]
)
def test_reused_process_number_gets_no_signal(state, started, changed):
    process = started()
    record(state / "8000", replace(identity_of(process), **changed))
    assert main(["stop"]) == 1
    assert process.poll() is None


def test_ended_process_is_not_running(started):
    process = started()
    identity = identity_of(process)
    assert identity.is_running
    process.kill()
    process.wait()
    assert not identity.is_running


def test_run_dir_is_found_where_it_was_given(tmp_path, state, started, capsys):
    record(tmp_path / "elsewhere", identity_of(started()))
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["ps", "--run-dir", str(tmp_path / "elsewhere")]) == 0
    assert "http://127.0.0.1:8000" in capsys.readouterr().out


def test_run_dir_in_use_is_refused_by_process_id(tmp_path, started):
    process = started()
    record(tmp_path, identity_of(process))
    (tmp_path / "gateway.log").write_text("of the one that runs")
    with pytest.raises(StartupError, match=f"in use by the tandem up with process id {process.pid}"):
        prepare_run_dir(tmp_path, files=[], logs=["gateway.log"])
    assert (tmp_path / "gateway.log").read_text() == "of the one that runs"


def test_end_of_a_run_keeps_the_list_of_files(tmp_path, started):
    record(tmp_path, identity_of(started()))
    record_run(tmp_path, None)
    assert read_run(tmp_path) is None
    (tmp_path / "keys.json").write_text("ours")
    prepare_run_dir(tmp_path, files=["keys.json"], logs=[])


def test_run_file_is_private_and_leaves_no_other_file(tmp_path, started):
    record(tmp_path, identity_of(started()))
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]
    assert stat.S_IMODE((tmp_path / RUN_FILE).stat().st_mode) == 0o600


def test_user_without_home_gets_the_flag_to_set(monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert main(["ps"]) == 2
    assert "set --run-dir, or XDG_STATE_HOME" in capsys.readouterr().err
