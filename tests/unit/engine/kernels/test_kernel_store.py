"""The files of compiled kernels: their owner, what is read of them, and one writer at a time."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_engine.kernels.store.code_file import Code, DamagedError, Environment, Header, decode
from tandem_engine.kernels.store.keys import KernelKey, KernelSpec
from tandem_engine.kernels.store.layers import STALE_AFTER_S, KernelStore, own_folder, prune, trust_of_package

SPEC = KernelSpec(function="some.module:build", arguments=(("capped", False), ("dtype", "float32"), ("head_dim", 16)))
KEY = KernelKey(spec=SPEC, target="x86-64-v3", compiler=("cpython-311", "0.68.1"))
OBJECT = b"\x7fELF\n\nany bytes"


def code_of(key: KernelKey, code: bytes = OBJECT) -> Code:
    header = Header(
        key=key.text,
        sha256=hashlib.sha256(code).hexdigest(),
        entry="entry",
        environment="env",
        environments=(Environment(name="env", dtypes=("int64", None)),),
        imports=("malloc",),
        returns=("tuple", ("array", "int64", 2, "C"), "int64"),
    )
    return Code(header=header, object=code)


def with_target(target: str) -> KernelKey:
    return KernelKey(spec=SPEC, target=target, compiler=KEY.compiler)


@pytest.fixture
def store(tmp_path) -> KernelStore:
    return KernelStore(own=tmp_path / "own", others=(tmp_path / "other",), packs=tmp_path / "packs")


def test_kernel_that_was_saved_is_found_again(store):
    assert not store.has(KEY)
    assert store.find(KEY) is None
    store.save(KEY, code_of(KEY))
    found = store.find(KEY)
    assert found is not None
    assert found.object == OBJECT
    assert found.header.environments == (Environment(name="env", dtypes=("int64", None)),)
    assert store.has(KEY)
    assert [path.name for path in store.own.iterdir() if path.is_file()] == [KEY.file_name]


@pytest.mark.parametrize(
    "other",
    [
        with_target("x86-64-v4"),
        KernelKey(spec=SPEC, target=KEY.target, compiler=("cpython-311", "0.69.0")),
        KernelKey(
            spec=KernelSpec(function=SPEC.function, arguments=(("head_dim", 32),)), target=KEY.target, compiler=()
        ),
    ],
    ids=["target", "compiler", "arguments"],
)
def test_kernel_of_another_key_is_not_found(store, other):
    store.save(KEY, code_of(KEY))
    assert store.find(other) is None
    (store.own / KEY.file_name).rename(store.own / other.file_name)
    assert store.find(other) is None, "by its name alone it would be"


@pytest.mark.parametrize("layer", ["other", "packs"])
def test_layers_that_are_read_alone_are_searched(store, tmp_path, layer):
    KernelStore(own=tmp_path / layer).save(KEY, code_of(KEY))
    assert store.find(KEY) is not None


@pytest.mark.parametrize("layer", ["own", "other"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777], ids=oct)
def test_layer_that_others_can_write_is_skipped(store, tmp_path, caplog, layer, mode):
    KernelStore(own=tmp_path / layer).save(KEY, code_of(KEY))
    (tmp_path / layer).chmod(mode)
    assert store.find(KEY) is None
    assert not store.has(KEY)
    assert f"chmod go-w {tmp_path / layer}" in caplog.text
    assert store.keeps() == (layer != "own")
    store.save(KEY, code_of(KEY, b"new"))
    (tmp_path / layer).chmod(0o755)
    found = store.find(KEY)
    assert found is not None
    assert found.object == (OBJECT if layer == "own" else b"new"), "nothing is written there either"


@pytest.mark.parametrize("part", ["folder", "file"])
def test_pack_that_more_users_can_write_than_code_is_skipped(store, part):
    KernelStore(own=store.packs).save(KEY, code_of(KEY))
    pack = store.packs if part == "folder" else store.packs / KEY.file_name
    pack.chmod(pack.stat().st_mode | 0o002)
    assert store.find(KEY) is None
    assert not store.has(KEY)
    pack.chmod(pack.stat().st_mode & ~0o002)
    assert store.find(KEY) is not None


@pytest.mark.parametrize(
    ("code_mode", "code_owner", "mode", "owner", "accepted"),
    [
        (0o644, 7, 0o644, 7, True),
        (0o644, 7, 0o644, 8, False),
        (0o644, 7, 0o664, 7, False),
        (0o664, 7, 0o664, 7, True),
        (0o664, 7, 0o666, 7, False),
    ],
    ids=["of one owner", "of another", "group may write", "as to the code", "all may write"],
)
def test_packs_are_trusted_as_the_code_next_to_them(code_mode, code_owner, mode, owner, accepted):
    class File:
        def stat(self) -> os.stat_result:
            return status_of(code_mode, code_owner)

    assert trust_of_package(File()).accepts(status_of(mode, owner)) is accepted


def status_of(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, owner, owner, 0, 0, 0, 0))


def test_file_that_others_can_write_is_skipped(store):
    store.save(KEY, code_of(KEY))
    (store.own / KEY.file_name).chmod(0o666)
    assert store.find(KEY) is None
    assert not store.has(KEY)


def test_file_of_another_user_is_skipped(store, monkeypatch):
    store.save(KEY, code_of(KEY))
    if os.geteuid() == 0:
        os.chown(store.own / KEY.file_name, 12345, -1)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert store.find(KEY) is None


def test_link_is_not_followed(store, tmp_path):
    elsewhere = KernelStore(own=tmp_path / "elsewhere")
    elsewhere.save(KEY, code_of(KEY))
    store.own.mkdir()
    (store.own / KEY.file_name).symlink_to(tmp_path / "elsewhere" / KEY.file_name)
    assert store.find(KEY) is None


def test_fifo_in_place_of_a_kernel_file_is_skipped(store):
    store.own.mkdir()
    os.mkfifo(store.own / KEY.file_name)
    assert store.find(KEY) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\x80\x04cos\nsystem\n" + data,
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data + b" ",
        lambda data: data[:0],
    ],
    ids=["pickle", "cut", "cut in the header", "longer", "empty"],
)
def test_damaged_file_is_no_kernel(store, caplog, damage):
    store.save(KEY, code_of(KEY))
    path = store.own / KEY.file_name
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(DamagedError):
        decode(damaged, key=KEY.text)
    assert store.find(KEY) is None
    assert f"{path} is no kernel that can be used" in caplog.text


def test_spec_is_read_back_from_its_text():
    of_types = KernelSpec(function="m:f", types=("int64", ("array", "float32", 2, "C"), ("tuple", "int64")))
    for spec in (SPEC, of_types):
        assert KernelSpec.parse(spec.text) == spec
    assert SPEC.name == "build(capped=False, dtype=float32, head_dim=16)"
    assert of_types.name == "f(int64, float32[2d], (int64))"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"TANDEM_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a/kernels"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tandem/kernels"),
        ({"XDG_CACHE_HOME": "relative"}, str(Path.home() / ".cache/tandem/kernels")),
    ],
)
def test_own_layer_follows_the_environment(environment, folder):
    assert own_folder(environment) == Path(folder)


def test_kernel_that_cannot_be_written_is_not_kept(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    store = KernelStore(own=tmp_path / "file" / "kernels", packs=tmp_path)
    store.save(KEY, code_of(KEY))
    assert "cannot keep a compiled kernel" in caplog.text
    assert not store.keeps()
    with store.compiling(KEY) as mine:
        assert mine


HOLDER = """
import sys
from pathlib import Path
from tests_key import KEY
from tandem_engine.kernels.store.layers import KernelStore

with KernelStore(own=Path(sys.argv[1])).compiling(KEY):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_one_process_compiles_a_kernel_until_it_dies(tmp_path):
    """The lock of a process that was killed is free: a waiting process continues."""
    (tmp_path / "tests_key.py").write_text(
        "from tandem_engine.kernels.store.keys import KernelKey, KernelSpec\n"
        f"KEY = KernelKey(spec=KernelSpec.parse({SPEC.text!r}), target={KEY.target!r}, compiler={KEY.compiler!r})\n"
    )
    store = KernelStore(own=tmp_path / "own")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.own)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with store.compiling(KEY, wait=False) as mine:
            assert not mine
        with store.compiling(with_target("another"), wait=False) as mine:
            assert mine, "the lock is of one kernel"
        holder.kill()
        with store.compiling(KEY) as mine:
            assert mine
    finally:
        holder.kill()
        holder.communicate()


def test_kernels_unused_for_long_or_too_many_are_pruned(store):
    sizes = {}
    for age, target in enumerate(["newest", "older", "oldest"]):
        key = with_target(target)
        store.save(key, code_of(key))
        path = store.own / key.file_name
        sizes[target] = path.stat().st_size
        os.utime(path, (1000.0 - age, 1000.0 - age))
    (store.own / ".new-1-ab").write_bytes(b"half")
    os.utime(store.own / ".new-1-ab", (0.0, 0.0))
    with store.compiling(with_target("newest")):
        pass
    assert prune(store.own, 1000.0) == []
    assert prune(store.own, 1000.0, largest=sum(sizes.values()) - 1) == [with_target("oldest").file_name]
    assert set(prune(store.own, 1000.0 + STALE_AFTER_S - 0.5)) == {with_target("older").file_name}
    prune(store.own, 1e10)
    assert [path for path in store.own.rglob("*") if path.is_file()] == []
