"""What the command line teaches and refuses."""

import logging
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli import machine_shares
from tandem_services.cli.chat.conversation import Turn
from tandem_services.cli.flags import bundled_model, model_folder
from tandem_services.cli.gateway import models_of
from tandem_services.cli.machine_shares import Cores
from tandem_services.cli.main import build_parser, main
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.cli.start_watch import readiness
from tandem_services.cli.up import greeting_of, plan, start
from tandem_services.common.errors import RemoteError, StartupError
from tandem_services.common.sockets import free_port

UP_S = 60.0
COMMANDS = ["up", "doctor", "chat", "bench", "verify", "simulate", "gateway", "router", "worker", "ctl", "keys"]


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
        (["keys", "create", "x", "--concurency", "4"], "did you mean --concurrency?"),
        (["ctl", "h:1", "profile", "--step", "4"], "did you mean --steps?"),
    ],
)
def test_misspelled_argument_suggests_nearest_match(argv, hint, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err


def test_flag_is_never_guessed_from_its_beginning(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--pref", "2"])
    assert "unrecognized arguments" in capsys.readouterr().err


BAD_VALUES = [
    (["up", "--port", "70000"], "--port: must be between 0 and 65535, got 70000"),
    (["up", "--kv-cache-gib", "0"], "--kv-cache-gib: must be a number above 0, got '0'"),
    (["up", "--ready-timeout", "-1"], "--ready-timeout: must be more than 0"),
    (["gateway", "--redis-url", "redis://h", "--port", "70000"], "--port: must be between 0 and 65535"),
    (["gateway", "--redis-url", "redis://h", "--drain-notice", "inf"], "--drain-notice: must be a number"),
    (["gateway"], "--redis-url"),
    (["worker", "--redis-url", "redis://h", "--health-port", "70000"], "--health-port: must be between 0 and 65535"),
    (["worker", "--redis-url", "redis://h", "--peer-port", "70000"], "--peer-port: must be between 0 and 65535"),
    (["bench", "serve", "--spread", "2"], "--spread: must be between 0 and 1, got 2"),
    (["simulate"], "required: --trace"),
    (["simulate", "--trace", "t.jsonl", "--cache-share", "2"], "--cache-share: must be between 0 and 1, got 2"),
    (["simulate", "--trace", "t.jsonl", "--prefill-rate", "0"], "--prefill-rate: must be more than 0"),
    (["bench", "serve", "--request-rate", "0"], "--request-rate: must be more than 0"),
    (["bench", "serve", "--request-rate", "nan"], "--request-rate: must be a number, got 'nan'"),
    (["bench", "serve", "--trace-scale", "-1"], "--trace-scale: must be more than 0"),
    (["bench", "serve", "--trace-speed", "0"], "--trace-speed: must be more than 0"),
    (["bench", "serve", "--slo-ttft-ms", "x"], "--slo-ttft-ms: must be a number, got 'x'"),
    (["bench", "serve", "--num-prompts", "1_000"], "--num-prompts: must be a whole number"),
    (["ctl", "h:1", "abort"], "one of the arguments RID --all is required"),
    (["ctl", "h:1", "pause", "--mode", "soft"], "invalid choice: 'soft'"),
    (["ctl", "h:1", "role", "cook"], "invalid choice: 'cook'"),
    (["worker", "--redis-url", "redis://h", "--drain-timeout", "0"], "--drain-timeout: must be more than 0"),
    (["chat", "--max-tokens", "0"], "--max-tokens: must be at least 1"),
    (["chat", "--temperature", "-1"], "--temperature: must be at least 0"),
    (["keys", "create", "x", "--concurrency", "0"], "--concurrency: must be at least 1"),
    (["verify", "--device", "gpu"], "--device: must be cpu, cuda or cuda:N, got 'gpu'"),
]


@pytest.mark.parametrize(("argv", "sentence"), BAD_VALUES, ids=[" ".join(argv) for argv, _ in BAD_VALUES])
def test_bad_value_is_a_usage_error_that_names_its_flag(argv, sentence, capsys) -> None:  # [config-refused]
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


BAD_DEPLOYMENTS = [
    (["gateway", "--redis-url", "http://me:secret@h"], "a Redis URL starts with one of redis://"),
    (["gateway", "--redis-url", "redis://me:secret@h:port"], "its host or port cannot be read"),
    (["gateway", "--redis-url", "redis://h", "--cluster", "a b"], "--cluster"),
    (["gateway", "--redis-url", "redis://h", "--port", "0", "--model", "/"], "no config.json"),
    (["gateway", "--redis-url", "redis://h", "--port", "0", "--curve-keys", "/does/not/exist"], "--curve-keys"),
    (["gateway", "--redis-url", "redis://h", "--host", "192.0.2.1"], "choose another --host or --port"),
    (
        ["gateway", "--redis-url", "redis://h", "--port", "0", "--admin-port", "0", "--admin-host", "192.0.2.1"],
        "choose another --admin-host or --admin-port",
    ),
    (["worker", "--redis-url", "http://me:secret@h"], "a Redis URL starts with one of redis://"),
    (["worker", "--redis-url", "redis://me:secret@h:port"], "its host or port cannot be read"),
    (["worker", "--redis-url", "redis://h", "--worker-id", "a b"], "--worker-id"),
    (["worker", "--redis-url", "redis://h", "--redis-password-file", "/does/not/exist"], "--redis-password-file"),
    (["up", "--redis-url", "http://me:secret@h", "--port", "0"], "a Redis URL starts with one of redis://"),
    (["up", "--redis-url", "redis://me:secret@127.0.0.1:1", "--port", "0"], "cannot use Redis at redis://me:***@"),
    (["up", "--port", "0", "--run-dir", "/proc/nope"], "choose another folder with --run-dir"),
    (["bench", "serve", "--trace", "/does/not/exist.jsonl"], "--trace /does/not/exist.jsonl"),
    (["bench", "serve", "--url", "not-a-url"], "not-a-url"),
    (["chat", "--url", "ftp://h"], "ftp://h"),
    (["ctl", "127.0.0.1:1", "flush-cache"], "give the HOST:PORT of its --health-port"),
    (["ctl", "no host", "audit"], "give the HOST:PORT of its --health-port"),
    (["up", "--mem-fraction-static", "1.5"], "--mem-fraction-static must be above 0 and at most 1, got 1.5"),
    (["up", "--num-pages", "9", "--mem-fraction-static", "0.5"], "--num-pages and --mem-fraction-static both"),
]


@pytest.mark.parametrize(("argv", "sentence"), BAD_DEPLOYMENTS, ids=[" ".join(argv) for argv, _ in BAD_DEPLOYMENTS])
def test_invalid_setting_is_one_sentence_and_a_status(argv, sentence, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # Of its own, not those that other tests left, to streams that are closed by now.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    status = main(argv)
    # As at the end of a process: lines are written by a thread.
    for handler in logging.getLogger().handlers:
        handler.flush()
    shown = capfd.readouterr().err
    assert status in (1, 2, 3)
    assert sentence in shown
    assert "Traceback" not in shown
    assert "secret" not in shown


def test_redis_password_is_not_on_the_command_line_of_any_child(tmp_path, monkeypatch) -> None:  # [secrets-in-files]
    monkeypatch.setattr("tandem_services.cli.up.require_redis", lambda _: None)
    monkeypatch.setattr(Child, "start", lambda _: None)
    parsed = args("--port", "0", "--run-dir", str(tmp_path), "--redis-url", "redis://me:se%40cret@h:1/2")
    supervisor = Supervisor()
    start(parsed, plan(parsed), supervisor, Cores())
    assert len(supervisor.children) == 3
    for child in supervisor.children:
        line = " ".join(child.argv)
        assert "cret" not in line
        assert f"--redis-url redis://me@h:1/2 --redis-password-file {tmp_path}/redis-password" in line
    password = tmp_path / "redis-password"
    assert (password.read_text(), password.stat().st_mode & 0o777) == ("se@cret", 0o600)


def test_environment_gives_defaults_and_flags_win(monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "redis://from-env")
    monkeypatch.setenv("TANDEM_CLUSTER", "blue")
    monkeypatch.setenv("TANDEM_WORKER_ID", "pod-0")
    parsed = build_parser().parse_args(["worker", "--cluster", "green"])
    assert (parsed.redis_url, parsed.cluster, parsed.worker_id) == ("redis://from-env", "green", "pod-0")


def test_misspelt_variable_is_answered_with_the_nearest(monkeypatch, capsys) -> None:  # [config-refused]
    monkeypatch.setenv("TANDEM_REDIS_URI", "redis://h")
    with pytest.raises(SystemExit):
        main(["up", "--prefil", "1"])
    assert "did you mean TANDEM_REDIS_URL?" in capsys.readouterr().err


def test_command_works_without_home_and_in_the_c_locale(tmp_path) -> None:  # [config-refused]
    done = subprocess.run(
        [sys.executable, "-m", "tandem_services.cli.main", "up", "--model", "/døes/not/exist"],
        env={"LANG": "C", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no such folder" in done.stderr


def args(*argv: str):
    return build_parser().parse_args(["up", *argv])


def test_plan_names_every_worker_and_shares_the_cores(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4, 12)))
    monkeypatch.setattr(machine_shares, "memory_limit", lambda: None)
    todo = plan(args("--prefill", "2", "--decode", "1", "--both", "1", "--port", "0", "--run-dir", str(tmp_path)))
    assert [name for name, _, _ in todo.workers] == ["prefill-0", "prefill-1", "decode-0", "both-0"]
    assert todo.threads == 2
    assert todo.mem_fraction_static is None
    assert todo.model_names == ("tandem-mini",)


def test_share_of_the_memory_is_divided_among_the_workers(tmp_path) -> None:
    asked = args("--prefill", "1", "--decode", "2", "--port", "0", "--run-dir", str(tmp_path))
    asked.mem_fraction_static = 0.9
    assert plan(asked).mem_fraction_static == 0.3


def test_workers_on_one_gpu_divide_memory_of_one(tmp_path) -> None:
    asked = args("--device", "cuda", "--port", "0", "--run-dir", str(tmp_path))
    assert plan(asked).mem_fraction_static == round(0.88 / 2, 4)
    asked = args("--device", "cuda:1", "--num-pages", "64", "--port", "0", "--run-dir", str(tmp_path))
    assert plan(asked).mem_fraction_static is None


@pytest.mark.parametrize(
    ("argv", "passed_on", "greeted"),
    [
        ([], [], True),
        (["--no-console"], ["--no-console"], False),
        (["--host", "0.0.0.0"], [], False),
        (["--host", "0.0.0.0", "--console"], ["--console"], True),
    ],
)
def test_greeting_names_the_console_where_the_gateway_serves_it(
    argv, passed_on, greeted, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("tandem_services.cli.up.require_redis", lambda _: None)
    monkeypatch.setattr(Child, "start", lambda _: None)
    parsed = args("--port", "0", "--run-dir", str(tmp_path), "--redis-url", "redis://h", *argv)
    todo, supervisor = plan(parsed), Supervisor()
    start(parsed, todo, supervisor, Cores())
    gateway = next(child for child in supervisor.children if child.name == "gateway")
    assert [flag for flag in gateway.argv if flag in ("--console", "--no-console")] == passed_on
    assert ("/console" in greeting_of(parsed, todo)) is greeted


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"--max-body-memory": "512", "--max-body-memory-per-client": "500"},
        {"--no-parse-special-tokens": None},
    ],
)
def test_up_passes_the_gateways_flags_on(given, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tandem_services.cli.up.require_redis", lambda _: None)
    monkeypatch.setattr(Child, "start", lambda _: None)
    flags = [word for pair in given.items() for word in pair if word is not None]
    parsed = args("--port", "0", "--run-dir", str(tmp_path), "--redis-url", "redis://h", *flags)
    supervisor = Supervisor()
    start(parsed, plan(parsed), supervisor, Cores())
    argv = next(child for child in supervisor.children if child.name == "gateway").argv
    gateway = build_parser().parse_args(argv[argv.index("gateway") :])
    alone = build_parser().parse_args([*GATEWAY, *flags])
    for name in ("max_body_memory", "max_body_memory_per_client", "parse_special_tokens"):
        assert getattr(gateway, name) == getattr(alone, name), name


def test_keys_of_clients_reach_the_gateway_and_the_greeting(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tandem_services.cli.up.require_redis", lambda _: None)
    monkeypatch.setattr(Child, "start", lambda _: None)
    keys = tmp_path / "clients.json"
    assert main(["keys", "create", "search", "--file", str(keys)]) == 0
    parsed = args("--port", "0", "--run-dir", str(tmp_path), "--redis-url", "redis://h", "--api-keys", str(keys))
    todo, supervisor = plan(parsed), Supervisor()
    start(parsed, todo, supervisor, Cores())
    gateway = next(child for child in supervisor.children if child.name == "gateway")
    assert f"--api-keys {keys}" in " ".join(gateway.argv)
    assert "-H 'Authorization: Bearer KEY' -d" in greeting_of(parsed, todo)
    assert "TANDEM_API_KEY=KEY tandem chat" in greeting_of(parsed, todo)


def test_greeting_names_order_urls_of_workers(tmp_path) -> None:
    parsed = args("--port", "0", "--run-dir", str(tmp_path))
    todo = plan(parsed)
    [(_, _, prefill), (_, _, decode)] = todo.workers
    assert f"tandem ctl 127.0.0.1:{prefill} links   commands to prefill-0; others: decode-0 {decode}\n" in greeting_of(
        parsed, todo
    )


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:"), ("::", "http://[::1]:"), ("0.0.0.0", "http://127.")]
)
def test_greeting_names_reachable_address_of_listen_host(host, url, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tandem_services.cli.up.listen", lambda *_: socket.socket())
    parsed = args("--host", host, "--port", "8123", "--run-dir", str(tmp_path))
    assert f"tandem-mini at {url}" in greeting_of(parsed, plan(parsed))


PLANNED = """
import sys
from tandem_services.cli.main import main
main(["up", "--port", "0", "--dry-run"])
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def test_plan_of_up_loads_no_client_of_redis_and_no_tokenizers() -> None:
    """It took half a second of one core, while no process that serves had been started."""
    done = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, check=True)
    heavy = {"redis", "opentelemetry", "prometheus_client", "httpx", "jinja2", "tokenizers", "torch", "numpy"}
    assert heavy & {*done.stderr.split()} == set()


def test_readiness_of_own_processes_bypasses_proxy(monkeypatch) -> None:
    """With HTTP_PROXY set and no NO_PROXY, `tandem up` waited until its timeout."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), AlwaysReady) as server:
        server.timeout = UP_S
        thread = Thread(target=server.handle_request)
        thread.start()
        assert readiness(f"http://127.0.0.1:{server.server_port}/ready").ready
        thread.join(UP_S)


class AlwaysReady(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_up_without_workers_is_wrong_usage(capsys) -> None:
    assert main(["up", "--prefill", "0", "--decode", "0"]) == 2
    assert "nothing to start: ask for --prefill and --decode workers, or --both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--prefill", "0", "--decode", "0"], "nothing to start"),
        (["--tp", "2", "--nnodes", "2", "--dist-init-addr", "a:1"], "`tandem up` is for one machine"),
        (["--decode", "0"], "add --decode 1"),
        (["--model", "/does/not/exist"], "no such folder"),
        (["--model", "/"], "no config.json"),
        (["--num-pages", "1"], "--num-pages"),
        (["--cpu-affinity", "0-1"], "takes auto or none"),
        (["--session-kv-gib", "nan"], "--session-kv-gib must be a finite number"),
        (["--grant-timeout", "nan"], "--grant-timeout must be a positive number of seconds, got nan"),
        (["--hold-timeout", "0"], "--hold-timeout must be a positive number of seconds, got 0"),
        (["--redis-password-file", "p"], "--redis-password-file requires --redis-url"),
        (["--api-keys", "/does/not/exist"], "--api-keys /does/not/exist: No such file"),
    ],
)
def test_plan_that_cannot_work_is_refused_before_anything_starts(argv, sentence, tmp_path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(args("--port", "0", "--run-dir", str(tmp_path), *argv))


def test_port_in_use_is_named_with_the_way_out(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}.*--port"):
            plan(args("--port", str(port), "--run-dir", str(tmp_path)))


def test_deliberate_errors_are_one_sentence_and_a_status(capsys) -> None:
    assert main(["verify", "--model", "/does/not/exist"]) == 2
    assert capsys.readouterr().err == "tandem: error: --model /does/not/exist: no such folder\n"
    assert main(["chat", "--url", f"http://127.0.0.1:{free_port()}"]) == 3
    assert "is `tandem up` running?" in capsys.readouterr().err


def test_bundled_model_is_the_default() -> None:
    assert model_folder(None) == bundled_model()


def test_value_is_no_misspelt_flag(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--watermark", "x"])
    assert capsys.readouterr().err.endswith("argument --watermark: invalid float value: 'x'\n")


def test_policy_of_the_simulator_is_named_by_its_flag(tmp_path, capsys) -> None:
    assert main(["simulate", "--trace", str(tmp_path / "t.jsonl"), "--policy", "nearest"]) == 2
    assert "error: --policy: there is no policy 'nearest'" in capsys.readouterr().err


def test_description_is_wrapped_and_examples_are_not(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["keys", "--help"])
    shown = capsys.readouterr().out
    description, examples = shown.split("examples:\n")
    assert max(map(len, description.splitlines())) <= 80
    assert "--tokens-per-minute 200000 --file keys.json\n" in examples


def test_chat_turn_collects_text_usage_id_and_raises_on_error() -> None:
    turn = Turn()
    assert turn.take({"id": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}]}).content == ""
    assert turn.first_token is None
    assert turn.take({"id": "x", "choices": [{"delta": {"content": "Hi"}}], "usage": None}).content == "Hi"
    turn.take({"id": "x", "choices": [], "usage": {"prompt_tokens": 1}})
    assert (turn.text, turn.response_id, turn.usage) == ("Hi", "x", {"prompt_tokens": 1})
    with pytest.raises(RemoteError, match="lost"):
        turn.take({"error": {"message": "lost"}})


@pytest.mark.parametrize("command", ["up", "gateway"])
def test_policy_that_is_none_is_refused_before_anything_starts(capsys, command: str) -> None:
    assert main([command, "--redis-url", "redis://127.0.0.1:1", "--router-policy", "nearest"]) == 2
    assert "there is no policy 'nearest'; choose from locality, round_robin" in capsys.readouterr().err


GATEWAY = ["gateway", "--redis-url", "redis://h"]


def test_model_names_after_the_first_are_aliases():
    [model] = models_of(build_parser().parse_args([*GATEWAY, "--served-model-name", "llama", "gpt"]))
    assert (model.name, model.names) == ("llama", ("llama", "gpt"))
    [model] = models_of(build_parser().parse_args(GATEWAY))
    assert model.names == ("tandem-mini",)


def test_models_file_takes_its_defaults_from_the_flags(tmp_path):
    (tmp_path / "models.toml").write_text(f'[[models]]\nmodel = "{bundled_model()}"\nqueue_timeout = 3\n')
    file = ["--models", str(tmp_path / "models.toml")]
    [model] = models_of(build_parser().parse_args([*GATEWAY, *file, "--max-waiting-requests", "5"]))
    assert (model.path, model.names) == (bundled_model(), ("tandem-mini",))
    assert (model.max_waiting, model.room_s) == (5, 3.0)


@pytest.mark.parametrize("flags", [["--model", "x"], ["--served-model-name", "x"]])
def test_models_file_and_a_model_exclude_each_other(tmp_path, flags):
    with pytest.raises(ConfigError, match="--models names all models: leave out --model"):
        models_of(build_parser().parse_args([*GATEWAY, "--models", str(tmp_path), *flags]))


def test_model_fleet_is_no_folder_and_needs_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet").mkdir()
    fleet = [*GATEWAY, "--model", "fleet"]
    [model] = models_of(build_parser().parse_args([*fleet, "--served-model-name", "llama", "gpt"]))
    assert (model.path, model.names) == (None, ("llama", "gpt"))
    with pytest.raises(ConfigError, match="--model fleet: add --served-model-name NAME"):
        models_of(build_parser().parse_args(fleet))
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        models_of(build_parser().parse_args([*GATEWAY, "--model", "./fleet"]))
