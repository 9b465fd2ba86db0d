"""What the command line teaches and refuses."""

import socket
import sys

import pytest

from tandem_engine.errors import ConfigError
from tandem_services.cli.bundled import bundled_model, model_folder
from tandem_services.cli.chat import Turn
from tandem_services.cli.main import build_parser, main
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.cli.redis_process import free_port, start_redis
from tandem_services.cli.up import plan
from tandem_services.common.errors import RemoteError, StartupError

COMMANDS = ["up", "chat", "bench", "verify", "gateway", "worker"]


@pytest.mark.parametrize("command", [[], *[[c] for c in COMMANDS], ["bench", "serve"], ["bench", "offline"]])
def test_every_command_explains_itself(command, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: tandem" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["up", "--prefil", "2"], "did you mean --prefill?"),
        (["bench", "serv"], "did you mean serve?"),
        (["chatt"], "did you mean chat?"),
        (["worker", "--redis-url", "redis://x", "--page-sise", "4"], "did you mean --page-size?"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(argv, hint, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_flag_is_never_guessed_from_its_beginning(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--pref", "2"])
    assert "unrecognized arguments" in capsys.readouterr().err


def args(*argv: str):
    return build_parser().parse_args(["up", *argv])


def test_a_plan_names_every_worker_and_shares_the_cores(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    todo = plan(args("--prefill", "2", "--decode", "1", "--both", "1", "--port", "0", "--run-dir", str(tmp_path)))
    assert [name for name, _, _ in todo.workers] == ["prefill-0", "prefill-1", "decode-0", "both-0"]
    assert todo.threads == 2
    assert todo.model_name == "tandem-mini"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--prefill", "0", "--decode", "0"], "nothing to start"),
        (["--decode", "0"], "add --decode 1"),
        (["--model", "/does/not/exist"], "no such folder"),
        (["--model", "/"], "no config.json"),
        (["--num-pages", "1"], "--num-pages"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_anything_starts(argv, sentence, tmp_path) -> None:
    with pytest.raises((ConfigError, StartupError), match=sentence):
        plan(args("--port", "0", "--run-dir", str(tmp_path), *argv))


def test_a_port_in_use_is_named_with_the_way_out(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}.*--port"):
            plan(args("--port", str(port), "--run-dir", str(tmp_path)))


def test_a_missing_redis_is_named_with_the_way_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="apt-get install redis-server"):
        start_redis(Supervisor(), tmp_path)


def test_errors_made_on_purpose_end_in_one_sentence_and_a_status(capsys) -> None:
    assert main(["verify", "--model", "/does/not/exist"]) == 2
    assert capsys.readouterr().err == "tandem: error: --model /does/not/exist: no such folder\n"
    assert main(["chat", "--url", f"http://127.0.0.1:{free_port()}"]) == 3
    assert "is `tandem up` running?" in capsys.readouterr().err


def test_the_bundled_model_is_the_default() -> None:
    assert model_folder(None) == bundled_model()


def test_a_child_that_exits_while_starting_shows_its_last_words(tmp_path) -> None:
    supervisor = Supervisor()
    code = "import sys; print('cannot find my shoes'); sys.exit(3)"
    supervisor.start(Child(name="walker", argv=[sys.executable, "-c", code], log=tmp_path / "walker.log"))
    supervisor.children[0].process.wait(20)
    with pytest.raises(StartupError, match=r"walker exited with status 3(.|\n)*cannot find my shoes"):
        supervisor.require_alive()
    supervisor.stop(grace=1)


def test_a_dead_child_is_restarted_after_its_pause_and_stopped_at_the_end(tmp_path) -> None:
    supervisor = Supervisor()
    child = Child(name="sleeper", argv=[sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log")
    supervisor.start(child)
    child.process.kill()
    child.process.wait(20)
    assert "killed by SIGKILL; restarting in 1 s" in supervisor.restart_dead()[0]
    assert supervisor.restart_dead() == []
    child.restart_at = 0.0
    assert supervisor.restart_dead() == ["sleeper restarted"]
    assert child.status is None
    supervisor.stop(grace=5)
    assert child.status is not None


def test_a_chat_turn_keeps_text_usage_and_id_and_raises_on_an_error_event() -> None:
    turn = Turn()
    assert turn.take({"id": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}]}) == ""
    assert turn.first_token is None
    assert turn.take({"id": "x", "choices": [{"delta": {"content": "Hi"}}], "usage": None}) == "Hi"
    turn.take({"id": "x", "choices": [], "usage": {"prompt_tokens": 1}})
    assert (turn.text, turn.response_id, turn.usage) == ("Hi", "x", {"prompt_tokens": 1})
    with pytest.raises(RemoteError, match="lost"):
        turn.take({"error": {"message": "lost"}})
