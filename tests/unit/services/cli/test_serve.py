"""What `tandem serve` would start."""

import json
import sys
from io import StringIO

import pytest
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.hub import Hub
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.cli.flags import bundled_model
from tandem_services.cli.gateway import models_of
from tandem_services.cli.machine_shares import Cores
from tandem_services.cli.main import build_parser, main
from tandem_services.cli.models.download_view import Bar, Lines
from tandem_services.cli.models.locate import model_source
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.cli.serve import choose_workers, visible_gpus
from tandem_services.cli.up import plan, start
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.output.reader import OutputDialect
from tandem_testing.adapters import write_adapter
from tandem_testing.hub_server import hub_server


def parsed(*words):
    return build_parser().parse_args(["serve", *words])


def chosen(*words, gpus=0):
    args = parsed(*words)
    choose_workers(args, gpus=gpus)
    return args.prefill, args.decode, args.both, args.devices


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        ((), 0, (0, 0, 1, ())),
        ((), 2, (0, 0, 1, ())),
        (("--device", "cuda"), 1, (0, 0, 1, ())),
        (("--device", "cuda"), 2, (1, 1, 0, ("cuda:0", "cuda:1"))),
        (("--device", "cuda:1"), 2, (0, 0, 1, ())),
        (("--device", "cuda", "--tp", "2"), 2, (0, 0, 1, ())),
        (("--device", "cuda", "--tp", "2"), 4, (1, 1, 0, ("cuda:0", "cuda:2"))),
        (("--prefill", "1", "--decode", "2"), 2, (1, 2, 0, ())),
        (("--device", "cuda", "--both", "2"), 2, (0, 0, 2, ())),
    ],
)
def test_workers_follow_from_flags_and_gpus(words, gpus, expected):
    assert chosen(*words, gpus=gpus) == expected


def test_two_workers_with_a_gpu_each_share_no_memory(tmp_path):
    args = parsed("--device", "cuda", "--port", "0", "--run-dir", str(tmp_path), "--mem-fraction-static", "0.8")
    choose_workers(args, gpus=2)
    assert plan(args).mem_fraction_static == 0.8
    args = parsed("--device", "cuda", "--both", "2", "--port", "0", "--run-dir", str(tmp_path))
    args.mem_fraction_static = 0.8
    choose_workers(args, gpus=2)
    assert plan(args).mem_fraction_static == 0.4


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Command lines by process name of what `tandem serve` with these words would start."""
    monkeypatch.setattr("tandem_services.cli.up.require_redis", lambda _: None)
    monkeypatch.setattr(Child, "start", lambda _: None)

    def started(*words, gpus=0):
        args = parsed(*words, "--port", "0", "--run-dir", str(tmp_path / "run"), "--redis-url", "redis://h")
        choose_workers(args, gpus=gpus)
        supervisor = Supervisor()
        start(args, plan(args), supervisor, Cores())
        return {child.name: " ".join(child.argv) for child in supervisor.children}

    return started


def test_each_of_two_workers_has_its_own_gpu(started):
    lines = started("--device", "cuda", gpus=2)
    assert "--device cuda:0" in lines["prefill-0"]
    assert "--device cuda:1" in lines["decode-0"]


def test_every_process_has_the_commit_of_the_start(started, tmp_path, monkeypatch):
    """[one-commit]"""
    with hub_server() as server:
        repo = server.add("org/mini", bundled_model())
        commit = repo.refs["main"]
        hub = Hub(endpoint=server.url, cache=tmp_path / "cache", wait_s=60.0)
        monkeypatch.setattr(Hub, "of_environment", lambda: hub)
        lines = started("org/mini")
        assert [request for request in server.requests if "/api/models/" in request] == [
            "GET /api/models/org/mini/revision/main"
        ]
    assert sorted(lines) == ["both-0", "gateway"]
    for line in lines.values():
        assert f"--model {tmp_path}/cache/models--org--mini/snapshots/{commit} --served-model-name org/mini" in line
    assert f"--model-root org/mini@{commit}" in lines["gateway"]


def test_every_worker_has_the_adapter_of_a_repository_in_one_folder(started, tmp_path, monkeypatch):
    with hub_server() as server:
        adapter = write_adapter(tmp_path / "adapter", bundled_model(), modules=["q_proj"])
        commit = server.add("org/sql", adapter).refs["main"]
        hub = Hub(endpoint=server.url, cache=tmp_path / "cache", wait_s=60.0)
        monkeypatch.setattr(Hub, "of_environment", lambda: hub)
        words = ("--prefill", "1", "--decode", "1", "--lora-modules", "sql=org/sql", f"law={adapter}")
        lines = started(*words)
        assert server.requests.count("GET /api/models/org/sql/revision/main") == 1
        with pytest.raises(
            ConfigError, match="--lora-modules: sql: .* has no repository org/none.*there is no folder org/none either"
        ):
            started("--lora-modules", "sql=org/none")
    for name in ("prefill-0", "decode-0"):
        folder = f"{tmp_path}/cache/models--org--sql/snapshots/{commit}"
        assert json.dumps({"name": "sql", "path": folder}) in lines[name]
        assert f"law={adapter}" in lines[name]
    with pytest.raises(ConfigError, match="sql: hf://org/sql is outside --lora-dir"):
        started("--lora-dir", str(tmp_path), "--lora-modules", "sql=hf://org/sql")


def test_missing_adapter_ends_a_start_before_the_model_arrives(started, tmp_path, monkeypatch):
    with hub_server() as server:
        server.add("org/mini", bundled_model())
        hub = Hub(endpoint=server.url, cache=tmp_path / "cache", wait_s=60.0)
        monkeypatch.setattr(Hub, "of_environment", lambda: hub)
        with pytest.raises(ConfigError, match="has no repository org/none"):
            started("org/mini", "--lora-modules", "sql=org/none")
        assert server.files_sent() == []


def test_served_model_names_and_root_reach_clients():
    words = [
        "gateway",
        "--redis-url",
        "redis://h",
        "--served-model-name",
        "mine",
        "also",
        "--model-root",
        "org/mini@c0",
    ]
    (config,) = models_of(build_parser().parse_args(words))
    tokenizer = TextTokenizer.load(config.path)
    dialect = OutputDialect.of(tokenizer, tool_call_parser="auto", reasoning_parser="auto")
    model = ServedModel(names=config.names, root=config.root, tokenizer=tokenizer, dialect=dialect, workers=tuple)
    assert [(card.id, card.root) for card in map(model.card, model.names)] == [
        ("mine", "org/mini@c0"),
        ("also", "org/mini@c0"),
    ]
    plain = ServedModel(names=("mine",), tokenizer=tokenizer, dialect=dialect, workers=tuple)
    assert plain.card("mine").root == "mine"


def test_gpus_that_are_hidden_do_not_count(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus(tmp_path) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == 0


def test_bundled_model_has_a_name(tmp_path):
    for words in ((), ("tandem-mini",)):
        args = parsed(*words, "--both", "1", "--port", "0", "--run-dir", str(tmp_path))
        choose_workers(args, gpus=0)
        todo = plan(args)
        assert (todo.model.folder, todo.model_names, args.dtype) == (bundled_model(), ("tandem-mini",), "float32")


def test_settings_file_names_models(tmp_path):
    (tmp_path / "c.yaml").write_text(f"models:\n  mine: {bundled_model()}\n")
    args = parsed(
        "mine", "--config", str(tmp_path / "c.yaml"), "--both", "1", "--port", "0", "--run-dir", str(tmp_path)
    )
    choose_workers(args, gpus=0)
    assert plan(args).model.folder == bundled_model()
    args = parsed("mime", "--config", str(tmp_path / "c.yaml"))
    choose_workers(args, gpus=0)
    with pytest.raises(ConfigError, match=r"no name \(mine\)"):
        plan(args)
    with pytest.raises(ConfigError, match="tandem-mini is the bundled model"):
        model_source("mine", {"tandem-mini": "org/other"})


def test_model_of_serve_has_no_flag(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--model", "org/mini"])
    assert "unrecognized arguments: --model (MODEL stands without a flag)" in capsys.readouterr().err


def test_download_on_a_terminal_is_a_bar():
    text = StringIO()
    bar = Bar("org/mini", Progress(DownloadColumn(), console=Console(file=text, force_terminal=True, width=80)))
    bar.say("a [line]")
    assert text.getvalue() == "tandem: a [line]\n"
    for done in range(0, 101, 50):
        bar.progress(done * 10**6, 100 * 10**6)
    bar.close()
    assert "100.0/100.0 MB" in text.getvalue()


def test_download_in_a_pipe_is_a_line_at_each_end(capsys):
    lines = Lines("org/mini", sys.stderr)
    for done in range(0, 101, 10):
        lines.progress(done * 10**6, 100 * 10**6)
    assert capsys.readouterr().err.splitlines() == [
        "tandem: org/mini: 0.0 of 100.0 MB downloaded",
        "tandem: org/mini: 100.0 of 100.0 MB downloaded",
    ]
