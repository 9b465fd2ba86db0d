"""Keys follow their file: edited, swapped as Kubernetes does, broken and mended."""

import json
import logging
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tandem_engine.base.errors import ConfigError
from tandem_services.gateway.access.keys import KeyWatch, digest_of
from tandem_services.gateway.access.tenants import AccessMetrics


def content(*keys: str) -> str:
    return json.dumps({"keys": [{"name": key, "sha256": [digest_of(key)]} for key in keys]})


def replace(path: Path, text: str) -> None:
    """As editors and `kubectl cp` do: a new file takes the name."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.rename(path)


class Watched:
    def __init__(self, path: Path) -> None:
        self.registry = CollectorRegistry()
        self.watch = KeyWatch(path=path, metrics=AccessMetrics(self.registry))

    @property
    def names(self) -> list[str]:
        return [tenant.name for tenant in self.watch.ring.tenants]

    @property
    def stale(self) -> float | None:
        return self.registry.get_sample_value("tandem_gateway_api_keys_stale")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(content("a"))
    return path


async def test_changed_file_is_taken_over(file):
    watched = Watched(file)
    watched.watch.start()
    before = watched.watch.ring
    await watched.watch.poll()
    assert watched.watch.ring is before
    replace(file, content("a", "b"))
    await watched.watch.poll()
    assert watched.names == ["a", "b"]
    assert watched.stale == 0


@pytest.mark.parametrize("broken", ["", "{", '{"keys": []}', '{"keys": [{"name": "a", "sha256": ["x"]}]}', None])
async def test_bad_file_keeps_the_former_keys_and_says_so_once(file, broken, caplog):
    watched = Watched(file)
    watched.watch.start()
    if broken is None:
        file.unlink()
    else:
        replace(file, broken)
    for _ in range(3):
        await watched.watch.poll()
    assert watched.names == ["a"]
    assert watched.stale == 1
    assert watched.registry.get_sample_value("tandem_gateway_api_key_reloads_total", {"outcome": "refused"}) == 1
    errors = [
        record for record in caplog.records if record.name.startswith("tandem") and record.levelno == logging.ERROR
    ]
    assert len(errors) == 1
    assert "keeping the previous ones" in errors[0].message
    replace(file, content("c"))
    await watched.watch.poll()
    assert (watched.names, watched.stale) == (["c"], 0)


async def test_restored_key_file_ends_the_error(file):
    watched = Watched(file)
    watched.watch.start()
    replace(file, "{")
    await watched.watch.poll()
    replace(file, content("a"))
    await watched.watch.poll()
    assert (watched.names, watched.stale) == (["a"], 0)


async def test_secret_is_swapped_as_a_whole(tmp_path):
    """A mounted Secret: files point to `..data`, which points to a folder with one version of all of them."""

    def version(name: str, **files: str) -> None:
        folder = tmp_path / f"..{name}"
        folder.mkdir()
        for file, text in files.items():
            (folder / f"{file}.json").write_text(text)
        fresh = tmp_path / "..data_tmp"
        fresh.symlink_to(folder.name)
        os.replace(fresh, tmp_path / "..data")

    version("v1", one=content("a"), two=content("b"))
    for file in ("one", "two"):
        (tmp_path / f"{file}.json").symlink_to(f"..data/{file}.json")
    watched = Watched(tmp_path)
    watched.watch.start()
    assert watched.names == ["a", "b"]
    version("v2", one=content("c"), two=content("d"))
    await watched.watch.poll()
    assert watched.names == ["c", "d"]
    # Half of the old and half of the new would have a digest twice, or a tenant too few.
    version("v3", one=content("d"), two=content("c"))
    await watched.watch.poll()
    assert watched.names == ["d", "c"]


@pytest.mark.parametrize("make", ["absent", "empty folder", "bad"])
def test_gateway_does_not_start_with_invalid_keys(tmp_path, make):
    path = tmp_path / "keys"
    if make == "empty folder":
        path.mkdir()
    if make == "bad":
        path.write_text("keys: []")
    with pytest.raises(ConfigError, match="--api-keys .*keys"):
        Watched(path).watch.start()


async def test_folder_may_lose_and_gain_files(tmp_path):
    (tmp_path / "one.json").write_text(content("a"))
    (tmp_path / "readme.txt").write_text("not a key file")
    watched = Watched(tmp_path)
    watched.watch.start()
    (tmp_path / "two.json").write_text(content("b"))
    await watched.watch.poll()
    assert watched.names == ["a", "b"]
    (tmp_path / "one.json").unlink()
    await watched.watch.poll()
    assert watched.names == ["b"]
