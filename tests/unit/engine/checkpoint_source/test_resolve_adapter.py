"""From a repository of a hub to the folder of a LoRA adapter, or to one sentence."""

import shutil
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.adapter import FILES, MAX_CONFIG, resolve_adapter
from tandem_engine.checkpoint_source.hub import Hub
from tandem_engine.checkpoint_source.resolve import NotCachedError, ResolvedModel
from tandem_engine.checkpoint_source.source import parse
from tandem_testing.hub_server import HubServer, hub_server

REPO = "org/sql"


class Lines:
    """A report that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, done: int, total: int) -> None:
        assert done <= total


@pytest.fixture
def server(tmp_path: Path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (*FILES, "README.md", "tokenizer.json", "adapter_model.bin"):
        (folder / name).write_text(name)
    with hub_server() as server:
        server.add(REPO, folder)
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(endpoint=server.url, cache=tmp_path / "cache", wait_s=60.0, give_up_s=120.0)


@pytest.fixture(autouse=True)
def no_pauses_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)


def pull(hub: Hub, text: str = REPO, *, offline: bool = False, report: Lines | None = None) -> ResolvedModel:
    return resolve_adapter(parse(text), offline=offline, report=report or Lines(), hub=hub)


def test_config_and_tensors_alone_are_fetched(server: HubServer, hub: Hub) -> None:
    found = pull(hub)
    assert found.root == f"{REPO}@{server.repos[REPO].refs['main']}"
    assert server.files_sent() == sorted(FILES)
    assert {path.name for path in found.folder.iterdir()} == {*FILES}


def test_second_start_sends_one_request_and_a_commit_none(server: HubServer, hub: Hub) -> None:
    first = pull(hub)
    server.requests.clear()
    assert pull(hub) == first
    assert server.requests == ["GET /api/models/org/sql/revision/main"]
    server.requests.clear()
    assert pull(hub, f"hf://{REPO}@{first.commit}") == first
    assert pull(hub, offline=True) == first
    assert server.requests == []


def test_new_commit_is_another_folder(server: HubServer, hub: Hub) -> None:
    first = pull(hub)
    server.repos[REPO].commit(dict.fromkeys(FILES, b"new") | {"more": b""})
    assert pull(hub).commit != first.commit
    assert pull(hub, f"{REPO}@{first.commit}") == first


def test_folder_needs_no_hub(server: HubServer, hub: Hub, tmp_path: Path) -> None:
    assert pull(hub, str(tmp_path)).folder == tmp_path
    assert server.requests == []


def test_hub_without_an_answer_serves_what_is_here(server: HubServer, hub: Hub) -> None:
    first, report = pull(hub), Lines()
    server.repos[REPO].status = 503
    assert pull(hub, report=report) == first
    assert "as it was downloaded" in report.lines[-1]
    shutil.rmtree(hub.cache)
    with pytest.raises(ConfigError, match="org/sql is not in the cache, and .*; there is no folder org/sql either"):
        pull(hub)


def test_refusal_of_the_hub_names_what_serves_the_download(server: HubServer, hub: Hub) -> None:
    pull(hub)
    server.repos[REPO].status = 403
    with pytest.raises(ConfigError, match=r"\(status 403\).*; HF_HUB_OFFLINE=1 serves it as it was downloaded"):
        pull(hub)
    shutil.rmtree(hub.cache)
    with pytest.raises(ConfigError, match="status 403") as refused:
        pull(hub)
    assert "HF_HUB_OFFLINE" not in str(refused.value)


def test_next_start_continues_a_download_that_failed(server: HubServer, hub: Hub) -> None:
    server.repos[REPO].cut = frozenset({FILES[1]})
    with pytest.raises(ConfigError, match=f"download of {FILES[1]} failed.*and the next start continues it"):
        pull(hub)
    server.repos[REPO].cut = frozenset()
    assert {path.name for path in pull(hub).folder.iterdir()} == {*FILES}


def test_offline_without_the_adapter_is_refused(server: HubServer, hub: Hub) -> None:
    with pytest.raises(NotCachedError, match="org/sql is not in the cache .*a start without --offline .* downloads it"):
        pull(hub, offline=True)
    assert server.requests == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}"}, "is no LoRA adapter: it has no adapter_config.json"),
        ({FILES[0]: b"{}", "adapter_model.bin": b""}, "no adapter_model.safetensors; pickled tensors are never read"),
        ({FILES[0]: b" " * (MAX_CONFIG + 1), FILES[1]: b""}, "adapter_config.json has 1.0 MB; at most"),
    ],
)
def test_repository_without_an_adapter_is_refused(
    server: HubServer, hub: Hub, files: dict[str, bytes], message: str
) -> None:
    server.repos[REPO].commit(files)
    with pytest.raises(ConfigError, match=message):
        pull(hub)
    assert server.files_sent() == []
