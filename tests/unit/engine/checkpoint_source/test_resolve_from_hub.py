"""From a repository of a hub to a whole snapshot of one commit, or to one sentence."""

import errno
import json
import shutil
import subprocess
import threading

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.hub import Hub
from tandem_engine.checkpoint_source.resolve import Needs, resolve
from tandem_engine.checkpoint_source.source import parse
from tandem_engine.config import ModelImpl
from tandem_engine.model.checkpoint import read_model_config
from tandem_testing.checkpoint_files import write_checkpoint
from tandem_testing.hub_server import hub_server

REPO = "org/mini"
SMALL = ["config.json", "tokenizer.json"]


class Lines:
    """A report that keeps its lines."""

    def __init__(self):
        self.lines, self.done = [], []

    def say(self, line):
        self.lines.append(line)

    def progress(self, done, total):
        self.done.append((done, total))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("read me")
    (folder / "pytorch_model.bin").write_bytes(b"never")
    return folder


@pytest.fixture
def server(checkpoint):
    with hub_server() as server:
        server.add(REPO, checkpoint)
        yield server


@pytest.fixture
def hub(server, tmp_path):
    return Hub(endpoint=server.url, cache=tmp_path / "cache", wait_s=60.0, give_up_s=120.0)


@pytest.fixture(autouse=True)
def no_pauses_between_attempts(monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)


def pull(hub, text=REPO, *, offline=False, report=None, needs=None):
    return resolve(parse(text), offline=offline, report=report or Lines(), hub=hub, needs=needs)


def refusal(hub, text=REPO, **options):
    with pytest.raises(ConfigError) as caught:
        pull(hub, text, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_exactly_the_needed_files_are_fetched(server, hub):
    report = Lines()
    model = pull(hub, report=report)
    assert model.root == f"{REPO}@{server.repos[REPO].refs['main']}"
    assert model.name == REPO
    assert server.files_sent() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert read_model_config(model.folder).num_layers == 2
    size = (model.folder / "model.safetensors").stat().st_size
    assert report.done[-1] == (size, size)


def test_files_that_an_index_names_are_fetched(server, hub, checkpoint):
    data = (checkpoint / "model.safetensors").read_bytes()
    files = {name: (checkpoint / name).read_bytes() for name in SMALL}
    index = {"weight_map": {"a": "one.safetensors", "b": "two[1].safetensors"}}
    files |= {"one.safetensors": data, "two[1].safetensors": data + b"2", "three.safetensors": data}
    server.repos[REPO].commit(files | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert pull(hub).folder.is_dir()
    sent = ["config.json", "model.safetensors.index.json", "one.safetensors", "tokenizer.json", "two[1].safetensors"]
    assert server.files_sent() == [name.replace("[", "%5B").replace("]", "%5D") for name in sent]


def test_second_start_sends_one_request(server, hub):
    first = pull(hub)
    server.requests.clear()
    assert pull(hub) == first
    assert server.requests == ["GET /api/models/org/mini/revision/main"]


def test_whole_snapshot_of_a_commit_needs_no_hub(server, hub):
    model = pull(hub)
    server.requests.clear()
    assert pull(hub, f"{REPO}@{model.commit}") == model
    assert server.requests == []


def test_offline_no_request_is_sent(server, hub):
    model = pull(hub)
    server.requests.clear()
    assert pull(hub, offline=True) == model
    assert server.requests == []


def test_offline_an_absent_repository_names_the_way_out(server, hub):
    message = refusal(hub, "Qwen/Qwen3-0.6B", offline=True)
    assert "not in the cache" in message
    assert "`tandem pull Qwen/Qwen3-0.6B`" in message
    assert server.requests == []


def test_cut_download_never_passes_for_whole(server, hub):
    """[half-snapshot]"""
    server.repos[REPO].cut = frozenset({"model.safetensors"})
    assert "download of model.safetensors failed" in refusal(hub)
    assert "only partly in the cache, without model.safetensors" in refusal(hub, offline=True)
    assert not list(hub.cache.glob("*/refs/*"))
    server.repos[REPO].cut = frozenset()
    assert pull(hub) == pull(hub, offline=True)


def test_partial_new_commit_keeps_the_old_one(server, hub, checkpoint):
    old = pull(hub)
    server.repos[REPO].commit({path.name: path.read_bytes() + b" " for path in checkpoint.iterdir()})
    server.repos[REPO].cut = frozenset({"model.safetensors"})
    server.gets.clear()
    refusal(hub)
    assert pull(hub, offline=True) == old


def test_references_of_other_programs_prove_nothing(server, hub):
    """They write them before they download."""
    model = pull(hub)
    (model.folder / "model.safetensors").unlink()
    assert "without model.safetensors" in refusal(hub, offline=True)


def test_branch_update_does_not_change_resolved_commit(server, hub, checkpoint):
    """[one-commit]"""
    first = pull(hub)
    before = (first.folder / "config.json").read_bytes()
    config = json.loads(before) | {"rope_theta": 20000.0}
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    server.repos[REPO].commit(files | {"config.json": json.dumps(config).encode()})
    second = pull(hub)
    assert first.commit != second.commit
    assert (first.folder / "config.json").read_bytes() == before


def test_without_an_answer_a_whole_snapshot_serves(server, hub):
    model = pull(hub)
    server.repos[REPO].held = threading.Event()
    report = Lines()
    impatient = Hub(endpoint=hub.endpoint, cache=hub.cache, wait_s=0.01)
    assert pull(impatient, report=report) == model
    (line,) = report.lines
    assert "did not answer within 0.01 s" in line
    assert "as it was downloaded on 20" in line


def test_absent_model_is_rejected_without_hub_answer(server, hub):
    server.repos[REPO].held = threading.Event()
    impatient = Hub(endpoint=hub.endpoint, cache=hub.cache, wait_s=0.01, give_up_s=0.02)
    assert "did not answer within 0.02 s" in refusal(impatient)


def test_hub_in_difficulties_serves_from_the_cache(server, hub):
    model, report = pull(hub), Lines()
    server.repos[REPO].status = 500
    assert pull(hub, report=report) == model
    assert "answers with status 500" in report.lines[0]


def test_hub_in_difficulties_is_named(server, hub):
    server.repos[REPO].status = 503
    assert "answers with status 503" in refusal(hub)


def test_unreachable_hub_is_named_in_the_error(server, hub):
    away = Hub(endpoint="http://127.0.0.1:9", cache=hub.cache)
    assert "127.0.0.1:9 cannot be reached" in refusal(away)


def test_unknown_repository_names_both_readings(hub):
    """[folder-or-hub]"""
    message = refusal(hub, "models/foo")
    assert "has no repository models/foo" in message
    assert "there is no folder models/foo" in message
    assert "folder" not in refusal(hub, "hf://models/foo")


def test_unknown_revision_is_named(hub):
    assert "has no revision v2" in refusal(hub, f"{REPO}@v2")


def test_renamed_repository_is_rejected_with_new_name(server, hub):
    server.repos[REPO].moved_to = "new/mini"
    server.repos["new/mini"] = server.repos["org/mini"].__class__(
        commits=server.repos[REPO].commits, refs=server.repos[REPO].refs
    )
    assert f"{REPO} is called new/mini" in refusal(hub)


def test_missing_repository_error_names_cached_copy(server, hub):
    pull(hub)
    del server.repos[REPO]
    message = refusal(hub)
    assert "has no repository org/mini" in message
    assert "HF_HUB_OFFLINE=1 serves it as it was downloaded on 20" in message


def test_gated_repository_names_the_token(server, hub):
    server.repos[REPO].token = "hf_secret"
    message = refusal(hub)
    assert f"{REPO} is gated" in message
    assert "HF_TOKEN" in message


def test_unknown_architecture_costs_no_weights(server, hub):
    """[config-before-weights]"""
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd"}
    files = server.repos[REPO].commits[server.repos[REPO].refs["main"]]
    server.repos[REPO].commit(files | {"config.json": json.dumps(config).encode()})
    assert "OddForCausalLM" in refusal(hub, needs=Needs(impl=ModelImpl.TANDEM))
    assert "model.safetensors" not in server.files_sent()


def test_transformers_is_consulted_before_weights(server, hub, monkeypatch):
    """[config-before-weights]"""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="config.json: no\n")

    monkeypatch.setattr("tandem_engine.checkpoint_source.examination.subprocess.run", run)
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd"}
    files = server.repos[REPO].commits[server.repos[REPO].refs["main"]]
    commit = server.repos[REPO].commit(files | {"config.json": json.dumps(config).encode()})
    assert refusal(hub) == "config.json: no"
    snapshot = f"{hub.cache}/models--org--mini/snapshots/{commit}"
    assert commands[0][2:] == ["tandem_engine.model.fallback_check", snapshot]
    assert "model.safetensors" not in server.files_sent()


def test_remote_code_costs_no_weights(server, hub):
    config = {"architectures": ["OddForCausalLM"], "auto_map": {"AutoModel": "odd.Odd"}}
    files = server.repos[REPO].commits[server.repos[REPO].refs["main"]]
    server.repos[REPO].commit(files | {"config.json": json.dumps(config).encode(), "odd.py": b"boom"})
    assert "never run" in refusal(hub, needs=Needs(impl=ModelImpl.TANDEM))
    assert server.files_sent() == SMALL


def test_code_of_an_architecture_of_ours_is_ignored(server, hub):
    files = server.repos[REPO].commits[server.repos[REPO].refs["main"]]
    config = json.loads(files["config.json"]) | {"auto_map": {"AutoModel": "odd.Odd"}}
    server.repos[REPO].commit(files | {"config.json": json.dumps(config).encode()})
    assert pull(hub).repo == REPO


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["config.json", "pytorch_model.bin"], "a pickle"),
        (["config.json"], "has no weights"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "is an adapter (PEFT), not a model: merge it into Q/Base",
        ),
        (["m.gguf"], "made of Q/Base: tandem serve Q/Base"),
        (["README.md"], "has no config.json"),
    ],
)
def test_unsupported_repository_is_rejected_by_its_file_names(server, hub, names, reason):
    server.repos[REPO].commit(dict.fromkeys(names, b"{}"))
    server.repos[REPO].card = {"base_model": ["Q/Base"]}
    assert reason in refusal(hub)
    assert server.files_sent() == []


def test_too_little_room_is_refused_with_both_numbers(server, hub, monkeypatch):
    server.repos[REPO].sizes = {"model.safetensors": 10**15}
    message = refusal(hub)
    assert "needs 1000000.0 GB more" in message
    assert f"{shutil.disk_usage(hub.cache).free / 1e9:.0f}"[:1] in message
    assert "model.safetensors" not in server.files_sent()


def test_index_cannot_name_files_elsewhere(server, hub):
    index = {"weight_map": {"a": "../../escape.safetensors"}}
    server.repos[REPO].commit(
        {
            name: data
            for name, data in server.repos[REPO].commits[server.repos[REPO].refs["main"]].items()
            if name in SMALL
        }
        | {"model.safetensors.index.json": json.dumps(index).encode()}
    )
    assert "which the repository lacks" in refusal(hub)


def test_dummy_weights_fetch_none(server, hub):
    pull(hub, needs=Needs(weights=False))
    assert server.files_sent() == SMALL
    assert "without model.safetensors" in refusal(hub, offline=True)


def test_repository_without_a_tokenizer_is_whole(server, hub):
    files = dict(server.repos[REPO].commits[server.repos[REPO].refs["main"]])
    del files["tokenizer.json"]
    server.repos[REPO].commit(files)
    assert pull(hub) == pull(hub, offline=True)


def test_full_disk_is_no_fault_of_the_hub(hub, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert f"{hub.cache} cannot be written: No space left" in refusal(hub)
