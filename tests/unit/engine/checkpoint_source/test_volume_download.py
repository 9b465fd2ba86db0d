"""From a repository of a hub to a whole commit on a volume: resumed, verified, or a reason."""

import errno
import hashlib
import os

import pytest

from tandem_engine.checkpoint_source import hub as hub_module
from tandem_engine.checkpoint_source import volume as volume_module
from tandem_engine.checkpoint_source import volume_download
from tandem_engine.checkpoint_source.hub import Hub
from tandem_engine.checkpoint_source.source import parse
from tandem_engine.checkpoint_source.volume import MANIFEST, Volume
from tandem_engine.checkpoint_source.volume_download import Reason, VolumeDownload, VolumeDownloadError
from tandem_testing import hub_server as hub_server_module
from tandem_testing.checkpoint_files import write_checkpoint
from tandem_testing.hub_server import hub_server

REPO = "org/mini"
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("read me")
    (folder / "pytorch_model.bin").write_bytes(b"never")
    (folder / "tokenizer.pkl").write_bytes(b"never")
    return folder


@pytest.fixture
def server(checkpoint):
    with hub_server() as server:
        server.add(REPO, checkpoint)
        yield server


@pytest.fixture
def volume(tmp_path):
    return Volume(path=tmp_path / "volume")


@pytest.fixture
def download(server, volume, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub(endpoint=server.url, cache=tmp_path / "cache")

    def start(name=REPO, **options):
        pauses = options.pop("pauses", [])
        one = VolumeDownload(hub=hub, source=parse(name), volume=volume, pause=pauses.append, **options)
        return one.run()

    return start


def failure(download, *args, **options):
    with pytest.raises(VolumeDownloadError) as error:
        download(*args, **options)
    return error.value


def test_commit_appears_whole_with_its_digests(download, server, volume, checkpoint):
    seen = []
    manifest = download(report=seen.append)
    folder = volume.path / server.repos[REPO].refs["main"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["config.json", "tokenizer.json", WEIGHTS, MANIFEST]
    )
    assert (folder / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    by_name = {file.name: file.sha256 for file in manifest.files}
    assert by_name[WEIGHTS] == hashlib.sha256((checkpoint / WEIGHTS).read_bytes()).hexdigest()
    assert len(manifest.fingerprint) == 64
    assert manifest.size == sum((checkpoint / name).stat().st_size for name in by_name)
    assert (seen[-1].done, seen[-1].total) == (manifest.size, manifest.size)
    assert not list(volume.path.glob(".*.part"))


def test_whole_commit_sends_no_request(download, server):
    commit = download().commit
    server.requests.clear()
    again = download(f"{REPO}@{commit}")
    assert again.commit == commit
    assert server.requests == []


def test_commit_that_lost_bytes_is_fetched_again(download, volume):
    first = download()
    os.truncate(volume.path / first.commit / WEIGHTS, 3)
    assert volume.whole(REPO, first.commit) is None
    assert download(f"{REPO}@{first.commit}") == first
    assert volume.whole(REPO, first.commit) == first


def test_download_continues_where_it_was_interrupted(download, server, volume, checkpoint):
    server.repos[REPO].cut = frozenset({WEIGHTS})
    assert failure(download).reason is Reason.UNREACHABLE
    commit = server.repos[REPO].refs["main"]
    (part,) = volume.path.glob(f".{commit}.part/{WEIGHTS}.part")
    size = (checkpoint / WEIGHTS).stat().st_size
    assert part.stat().st_size == size // 2
    assert not (volume.path / commit).exists()
    server.repos[REPO].cut = frozenset()
    server.gets.clear()
    seen = []
    manifest = download(report=seen.append)
    assert volume.whole(REPO, commit) == manifest
    assert server.files_sent() == [WEIGHTS], "verified files are not fetched again"
    assert max(one.done for one in seen) == manifest.size


def test_download_waits_retry_after_of_rate_limit(download, server):
    server.repos[REPO].limited = 2
    pauses = []
    download(pauses=pauses)
    assert len(pauses) == 2
    assert all(1.0 <= pause <= 1.25 for pause in pauses)


def test_rate_limit_without_end_may_pass_later(download, server):
    server.repos[REPO].limited = 1000
    error = failure(download)
    assert (error.reason, error.passing) == (Reason.RATE_LIMITED, True)


def test_wrong_bytes_are_fetched_once_more(download, server, volume):
    server.repos[REPO].wrong[WEIGHTS] = 1
    manifest = download()
    assert volume.whole(REPO, manifest.commit) == manifest
    assert server.gets[f"/{REPO}/resolve/{manifest.commit}/{WEIGHTS}"] == 2


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_file_whose_checksum_stays_wrong_fails_the_download(download, server, volume, name):
    server.repos[REPO].wrong[name] = 1000
    error = failure(download)
    assert (error.reason, error.passing) == (Reason.CHECKSUM, False)
    assert name in str(error)
    assert not (volume.path / server.repos[REPO].refs["main"]).exists()


def test_gated_repository_needs_the_token(download, server, monkeypatch):
    server.repos[REPO].token = "hf_good"
    assert failure(download).reason is Reason.AUTH_REFUSED
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert download().commit


def test_download_errors_distinguish_auth_not_found_unreachable(download, server):
    assert failure(download, "org/other").reason is Reason.AUTH_REFUSED
    assert failure(download, f"{REPO}@nope").reason is Reason.NOT_FOUND
    server.repos[REPO].status = 503
    error = failure(download)
    assert (error.reason, error.passing) == (Reason.UNREACHABLE, True)


def test_checkpoint_above_the_limit_fetches_no_weights(download, server):
    error = failure(download, limit=100)
    assert error.reason is Reason.NO_SPACE
    assert error.needed > 100
    assert WEIGHTS not in server.files_sent()


def test_full_volume_fetches_no_weights(download, server, monkeypatch):
    usage = type("usage", (), {"free": 5})
    monkeypatch.setattr(volume_download.shutil, "disk_usage", lambda _: usage)
    error = failure(download)
    assert error.reason is Reason.NO_SPACE
    assert error.needed > 5
    assert WEIGHTS not in server.files_sent()


def test_full_volume_keeps_downloaded_files(download, server, volume, monkeypatch):
    commit = server.repos[REPO].refs["main"]
    record = Volume.record

    def full(self, commit, file):
        if file.name == WEIGHTS:
            raise OSError(errno.ENOSPC, "No space left on device")
        record(self, commit, file)

    monkeypatch.setattr(Volume, "record", full)
    error = failure(download)
    assert (error.reason, error.passing) == (Reason.NO_SPACE, False)
    monkeypatch.undo()
    assert set(volume.verified(commit)) == {"config.json", "tokenizer.json"}
    assert volume.whole(REPO, download().commit)
    assert server.gets[f"/{REPO}/resolve/{commit}/{WEIGHTS}"] == 1, "what was not recorded is compared, not fetched"


def test_pickled_weights_are_refused(download, server):
    files = {"config.json": b"{}", "pytorch_model.bin": b"never"}
    server.repos[REPO].commit(files)
    error = failure(download)
    assert error.reason is Reason.NOT_SERVABLE
    assert "safetensors" in str(error)


@pytest.mark.parametrize("shard", ["../model.safetensors", "pytorch_model.bin"])
def test_index_names_no_file_outside_or_pickled(download, server, shard):
    index = b'{"weight_map": {"a": "%s"}}' % shard.encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index, shard: b"x"}
    server.repos[REPO].commit(files)
    assert failure(download).reason is Reason.NOT_SERVABLE


def test_two_downloads_of_a_volume_exclude_each_other(download, volume):
    with volume.locked(0.0):
        error = failure(download, lock_s=0.0)
    assert (error.reason, error.passing) == (Reason.BUSY, True)
    assert download()


def test_unused_commits_are_removed_from_the_volume(download, server, volume):
    first = download().commit
    files = dict(server.repos[REPO].commits[first])
    second = server.repos[REPO].commit(files | {"more.txt": b"more"})
    download()
    assert volume.remove_others([first, second]) == []
    assert volume.remove_others([second]) == [first]
    assert volume.whole(REPO, second)
    assert volume.whole(REPO, first) is None


def test_abandoned_download_is_removed_by_the_next_complete_one(download, server, volume):
    repo = server.repos[REPO]
    former, files = repo.refs["main"], dict(repo.commits[repo.refs["main"]])
    repo.cut = frozenset({WEIGHTS})
    failure(download)
    repo.cut = frozenset()
    repo.commit(files | {"more.txt": b"more"})
    assert volume.partial(former).exists()
    download()
    assert not volume.partial(former).exists()


def test_interrupted_removal_leaves_no_half_of_a_commit(download, server, volume, monkeypatch):
    first = download().commit
    removed = volume_module.shutil.rmtree

    def interrupted(path, *args, **options):
        (path / "config.json").unlink()
        raise OSError(errno.EIO, "interrupted")

    monkeypatch.setattr(volume_module.shutil, "rmtree", interrupted)
    with pytest.raises(OSError, match="interrupted"):
        volume.remove_others([])
    monkeypatch.setattr(volume_module.shutil, "rmtree", removed)
    assert not (volume.path / first).exists()
    server.gets.clear()
    assert download(f"{REPO}@{first}").commit == first
    assert server.files_sent() == ["config.json"], "what is still there is compared, and not fetched"


def test_file_named_like_the_manifest_is_left_out(download, server, volume):
    repo = server.repos[REPO]
    commit = repo.commit(repo.commits[repo.refs["main"]] | {MANIFEST: b"{}"})
    assert volume.whole(REPO, commit) is None
    manifest = download()
    assert MANIFEST not in {file.name for file in manifest.files}
    assert volume.whole(REPO, commit) == manifest


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_hub_without_sizes_gives_no_empty_files(download, server, volume, monkeypatch, name):
    monkeypatch.setattr(hub_module, "_digest", lambda _: "")
    server.repos[REPO].sizes[name] = 0
    error = failure(download)
    assert (error.reason, name in str(error)) == (Reason.NOT_SERVABLE, True)
    assert not (volume.path / server.repos[REPO].refs["main"]).exists()


def test_empty_file_with_its_digest_is_fetched(download, server):
    repo = server.repos[REPO]
    repo.commit(repo.commits[repo.refs["main"]] | {"empty.txt": b""})
    assert ("empty.txt", 0) in {(file.name, file.size) for file in download().files}


def test_more_small_files_than_expected_are_refused(download, server, monkeypatch):
    monkeypatch.setattr(volume_download, "MAX_FILES", 1)
    assert failure(download).reason is Reason.NOT_SERVABLE
    assert server.files_sent() == []


def test_small_files_without_room_are_not_fetched(download, server):
    assert failure(download, limit=1).reason is Reason.NO_SPACE
    assert server.files_sent() == []


def test_server_without_ranges_that_breaks_off_is_given_up(download, server, monkeypatch):
    monkeypatch.setattr(volume_download, "_continues", lambda *_: False)
    server.repos[REPO].cut = frozenset({WEIGHTS})
    ends = iter([6, 5, 4] * 100)
    monkeypatch.setattr(hub_server_module._Handler, "_kept", lambda *_: next(ends))
    assert failure(download).reason is Reason.UNREACHABLE
    assert server.gets[f"/{REPO}/resolve/{server.repos[REPO].refs['main']}/{WEIGHTS}"] < 20


def test_file_system_without_locks_is_named(download, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(volume_module.fcntl, "flock", refused)
    error = failure(download)
    assert error.reason is Reason.NOT_WRITABLE
    assert "flock" in str(error)


def test_folder_of_another_user_is_named_with_its_owner(download, volume, monkeypatch):
    """As the kubelet leaves them on a volume that was wiped."""
    place = volume.path / "below" / ".lock"

    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    monkeypatch.setattr(volume_module.fcntl, "flock", refused)
    error = failure(download)
    assert error.reason is Reason.NOT_WRITABLE
    assert f"{volume.path} belongs to user {volume.path.stat().st_uid}, and this is user" in str(error)
