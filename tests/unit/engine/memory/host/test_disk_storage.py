import errno
import os
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.memory.host.storage import HEADER, DiskStorage, Fetched

PAGE_BYTES = 64
FILE_BYTES = HEADER.size + PAGE_BYTES
MODEL = bytes(range(16))


def key(number: int) -> bytes:
    return bytes([number]) * 16


def page(number: int) -> memoryview:
    return memoryview(bytearray([number]) * PAGE_BYTES)


@pytest.fixture
def opened(tmp_path):
    """Opens the same directory again and again; all are closed at the end."""
    storages = []

    def open_(*, model: bytes = MODEL, page_bytes: int = PAGE_BYTES, files: int = 4, directory: Path = tmp_path):
        storage = DiskStorage(directory, fingerprint=model, page_bytes=page_bytes, max_bytes=files * FILE_BYTES)
        storages.append(storage)
        return storage

    yield open_
    for storage in storages:
        storage.close()


def fetch(storage: DiskStorage, number: int) -> tuple[Fetched, bytes]:
    buffer = page(255)
    return storage.get(key(number), buffer).result(), bytes(buffer)


def test_stored_block_is_read_unchanged(opened):
    storage = opened()
    assert key(1) not in storage
    assert storage.put(key(1), page(7)).result().stored
    assert key(1) in storage
    assert fetch(storage, 1) == (Fetched.WHOLE, bytes(page(7)))


def test_blocks_survive_a_restart(opened):
    first = opened()
    for number in (1, 2):
        first.put(key(number), page(number))
    first.close()
    second = opened()
    assert {*second.hashes()} == {key(1), key(2)}
    assert len(second) == 2
    assert fetch(second, 2) == (Fetched.WHOLE, bytes(page(2)))


def test_least_recently_used_make_room(opened):
    storage = opened(files=2)
    for number in (1, 2):
        storage.put(key(number), page(number)).result()
    fetch(storage, 1)
    report = storage.put(key(3), page(3)).result()
    assert report.evicted == (key(2),)
    assert {*storage.hashes()} == {key(1), key(3)}


def test_recency_survives_a_restart_and_a_smaller_bound(opened, tmp_path):
    first = opened()
    for number in (1, 2, 3):
        first.put(key(number), page(number)).result()
    first.close()
    # Files that follow each other closely can have the same time.
    newest = max(file.stat().st_mtime_ns for file in tmp_path.iterdir()) + 1
    os.utime(tmp_path / f"{key(1).hex()}.{MODEL.hex()}.kv", ns=(newest, newest))
    assert {*opened(files=1).hashes()} == {key(1)}


def test_bound_holds_on_disk(opened, tmp_path):
    storage = opened(files=2)
    for number in range(6):
        storage.put(key(number), page(number)).result()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 2 * FILE_BYTES


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: HEADER.size - 1],
        lambda data: data[:0],
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
    ],
    ids=["short", "no header", "empty", "long", "page", "magic", "hash"],
)
def test_damaged_file_is_a_miss_and_is_deleted(opened, tmp_path, damage):
    storage = opened()
    storage.put(key(1), page(1)).result()
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert fetch(storage, 1)[0] is Fetched.LOST
    assert key(1) not in storage
    assert [*tmp_path.iterdir()] == []
    assert fetch(storage, 1)[0] is Fetched.ABSENT


def test_removed_storage_file_is_a_miss(opened, tmp_path):
    storage = opened()
    storage.put(key(1), page(1)).result()
    next(tmp_path.iterdir()).unlink()
    assert fetch(storage, 1)[0] is Fetched.LOST


def test_blocks_of_another_model_or_shape_are_not_seen(opened):
    opened().put(key(1), page(1)).result()
    other = opened(model=bytes(16))
    assert key(1) not in other
    assert fetch(other, 1)[0] is Fetched.ABSENT


def test_file_renamed_to_another_block_is_a_miss(opened, tmp_path):
    storage = opened()
    storage.put(key(1), page(1)).result()
    storage.put(key(2), page(2)).result()
    (tmp_path / f"{key(1).hex()}.{MODEL.hex()}.kv").replace(tmp_path / f"{key(2).hex()}.{MODEL.hex()}.kv")
    assert fetch(storage, 2)[0] is Fetched.LOST


def test_foreign_models_count_against_the_bound_and_age_out(opened):
    other = opened(model=bytes(16))
    for number in (1, 2):
        other.put(key(number), page(number)).result()
    storage = opened(files=2)
    storage.put(key(3), page(3)).result()
    assert {*storage.hashes()} == {key(3)}
    assert fetch(other, 2)[0] is Fetched.WHOLE
    assert fetch(other, 1)[0] is Fetched.LOST


def test_files_that_are_not_blocks_are_left_alone(opened, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "zz.kv").write_text("mine too")
    (tmp_path / f"{key(1).hex()}.{MODEL.hex()}.kv.123.part").write_text("half a block")
    storage = opened(files=1)
    storage.put(key(1), page(1)).result()
    storage.clear()
    storage.close()
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "zz.kv"}


def test_block_is_stored_once(opened):
    storage = opened()
    assert storage.put(key(1), page(1)).result().stored
    assert storage.put(key(1), page(9)).result().stored
    assert fetch(storage, 1) == (Fetched.WHOLE, bytes(page(1)))


def test_workers_with_one_pid_write_one_block_apart(opened, monkeypatch, tmp_path):
    """Containers have pids of their own."""
    written, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: (written.append(path), replace(path, target)))
    for storage in (opened(), opened()):
        assert storage.put(key(1), page(7)).result().stored
    first, second = written
    assert first != second
    first.write_bytes(b"of a worker that was killed")
    opened()
    assert not first.exists()


def test_clearing_forgets_stored_and_pending_blocks(opened, tmp_path):
    storage = opened()
    storage.put(key(1), page(1)).result()
    storage.put(key(2), page(2))
    storage.clear()
    assert key(1) not in storage
    storage.close()
    assert len(storage) == 0
    assert [*tmp_path.iterdir()] == []


def test_disk_that_takes_nothing_stores_nothing(opened, monkeypatch, tmp_path):
    storage = opened()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert not storage.put(key(1), page(1)).result().stored
    assert key(1) not in storage
    assert [*tmp_path.iterdir()] == []


def test_full_disk_logs_one_warning_until_it_recovers(opened, monkeypatch, caplog):
    storage = opened()
    write = os.writev

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    for number in range(1, 6):
        storage.put(key(number), page(number)).result()
    [line] = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in line
    monkeypatch.setattr(os, "writev", write)
    assert storage.put(key(1), page(1)).result().stored
    assert "5 were not stored in the meantime" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2


def test_directory_that_cannot_be_used_is_refused(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--hicache-storage-dir .*name a directory"):
        opened(directory=tmp_path / "file" / "below")


def test_bound_below_one_block_is_refused(opened):
    with pytest.raises(ConfigError, match="--hicache-storage-size .* raise it"):
        opened(files=0)
