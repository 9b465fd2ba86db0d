"""A kit for a GPU machine: what is packed, its size, and that it is unpacked as it was packed."""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tandem_testing.benchmark_modules import BENCHMARKS, benchmarks_importable

with benchmarks_importable():
    from gpu.kit import nixl, pack, pins, unpack
    from gpu.kit.manifest import KERNELS, KitError, Manifest, Packed

LIBRARY = importlib.util.find_spec("_json").origin
"""A small shared library."""
NIXL_FILES = [
    "nixl_cu13/_bindings.so",
    "nixl_cu13.libs/libucp-1.so",
    "nixl_cu13.libs/libaws.so",
    "nixl_cu13.libs/ucx/libuct_cuda.so.0",
    "nixl_cu13.libs/ucx/libuct_ib.so.0",
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_OBJ.so",
    ".nixl_cu13.mesonpy.libs/libnixl.so",
]


def wheel(folder, name, version, files):
    """A wheel for any Python, with files of other contents than their names."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    home = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{home}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        packed.writestr(f"{home}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{home}/RECORD", "")
        for inner in files:
            packed.write(LIBRARY, inner)
    return path


@pytest.fixture
def registry(tmp_path):
    """A folder with a wheel of each package, in its pinned version."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    versions = pins.pinned((*pins.PACKAGES, pins.NIXL), pins.CONSTRAINTS.read_text())
    for name, version in versions.items():
        wheel(folder, name, version, NIXL_FILES if name == pins.NIXL else [f"{name}/module.so"])
    return folder


def packed(registry, folder, **options):
    return pack.pack(folder, sources=("--no-index", "--find-links", str(registry)), **options)


def test_kit_keeps_nixl_libraries_of_ucx_backend():
    needed = {
        "nixl_cu13/_bindings.so": ["libnixl.so", "libc.so.6"],
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so": ["libucp-1.so"],
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_OBJ.so": ["libaws.so"],
    }
    kept = nixl.closure([*NIXL_FILES, "nixl_cu13-1.0.dist-info/METADATA"], needed)
    dropped = {*NIXL_FILES} - {*kept}
    assert dropped == {
        "nixl_cu13.libs/libaws.so",
        "nixl_cu13.libs/ucx/libuct_ib.so.0",
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_OBJ.so",
    }


def test_nixl_wheel_laid_out_otherwise_is_refused():
    with pytest.raises(ValueError, match="libplugin_UCX"):
        nixl.closure([name for name in NIXL_FILES if "UCX" not in name], {})


def test_needed_libraries_are_read_from_the_binary():
    assert "libc.so.6" in nixl.needed_by(Path(shutil.which("readelf")))


def test_kit_from_local_wheels_is_unpacked_as_packed(registry, tmp_path, monkeypatch):
    manifest = packed(registry, tmp_path / "kit")
    assert Manifest.read(tmp_path / "kit") == manifest
    assert manifest.versions["msgspec"] == pins.pinned(("msgspec",), pins.CONSTRAINTS.read_text())["msgspec"]
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "12", "1"))
    unpack.unpack(tmp_path / "kit", tmp_path / "site")
    library = hashlib.sha256(Path(LIBRARY).read_bytes()).digest()
    for name in ("msgspec/module.so", "nixl_cu13.libs/ucx/libuct_cuda.so.0"):
        assert hashlib.sha256((tmp_path / "site" / name).read_bytes()).digest() == library
    assert not (tmp_path / "site" / "nixl_cu13.libs/libaws.so").exists()


def test_package_that_cannot_be_had_is_an_error(registry, tmp_path, monkeypatch, capsys):
    next(registry.glob("msgspec-*")).unlink()
    assert pack.main([str(tmp_path / "kit"), "--find-links", str(registry)]) == 1
    assert "gpu-pack:" in capsys.readouterr().err
    with pytest.raises(KitError, match=r"is no kit .* tools/gpu_pack.sh"):
        Manifest.read(tmp_path / "kit")


def test_kit_too_large_with_its_tree_is_refused():
    files = [Packed("small", 10, ""), Packed("large", 5 << 20, "")]
    manifest = Manifest(commit="c", python="3.12", versions={}, files=files, tree_bytes=60 << 20)
    with pytest.raises(KitError, match=r"kit \(5.0 MiB\) and tree \(60.0 MiB\) exceed 64.0 MiB; .* large 5.0 MiB"):
        pack.check_size(manifest, pack.LIMIT_BYTES)
    pack.check_size(manifest, 66 << 20)


def test_kit_tree_has_files_not_ignored_by_git(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").write_bytes(b"x" * 100)
    (tmp_path / "new").write_bytes(b"x" * 10)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "wheel").write_bytes(b"x" * 1000)
    assert pack.tree_bytes(tmp_path, tmp_path / "kit") == len("ignored\n") + 10


def a_kit(folder, *, python, files=("one-1-py3-none-any.whl",)):
    folder.mkdir()
    wheel(folder, "one", "1", ["one/module.so"])
    manifest = Manifest(
        commit="c", python=python, versions={}, files=[Packed.of(folder / name) for name in files], tree_bytes=0
    )
    manifest.write(folder)
    return folder


def test_kit_for_another_python_is_refused(tmp_path):
    kit = a_kit(tmp_path / "kit", python="2.7")
    with pytest.raises(KitError, match=r"for Python 2.7, this is 3"):
        unpack.unpack(kit, tmp_path / "site")


def test_damaged_kit_is_refused(tmp_path):
    kit = a_kit(tmp_path / "kit", python=".".join(platform.python_version_tuple()[:2]))
    (kit / "one-1-py3-none-any.whl").write_bytes(b"PK")
    with pytest.raises(KitError, match="not the file that was packed"):
        unpack.unpack(kit, tmp_path / "site")
    (kit / "one-1-py3-none-any.whl").unlink()
    with pytest.raises(KitError, match="is absent"):
        unpack.unpack(kit, tmp_path / "site")


def test_unpacked_kit_is_replaced_by_a_kit_with_other_wheels(tmp_path):
    running = ".".join(platform.python_version_tuple()[:2])
    kit, site = a_kit(tmp_path / "kit", python=running), tmp_path / "site"
    unpack.unpack(kit, site)
    (site / "one" / "stale").touch()
    unpack.unpack(kit, site)
    assert (site / "one" / "stale").exists()
    wheel(kit, "one", "1", ["two/module.so"])
    Manifest(
        commit="d", python=running, versions={}, files=[Packed.of(kit / "one-1-py3-none-any.whl")], tree_bytes=0
    ).write(kit)
    unpack.unpack(kit, site)
    assert not (site / "one").exists()
    assert (site / "two").exists()


def test_kit_is_not_unpacked_into_a_folder_with_other_files(tmp_path):
    kit = a_kit(tmp_path / "kit", python=".".join(platform.python_version_tuple()[:2]))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine").touch()
    with pytest.raises(KitError, match="something other than a kit"):
        unpack.unpack(kit, tmp_path / "site")
    assert (tmp_path / "site" / "mine").exists()


def test_wheel_that_needs_an_installer_is_refused(tmp_path):
    kit = tmp_path / "kit"
    kit.mkdir()
    path = wheel(kit, "one", "1", ["one-1.data/scripts/run"])
    with pytest.raises(KitError, match="only an installer"):
        unpack._place(path, tmp_path / "site")


def test_equal_files_give_equal_archives(tmp_path):
    whole = wheel(tmp_path, "nixl-cu13", "1.0", NIXL_FILES)
    archives = [tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"]
    for archive in archives:
        nixl.slim(whole, archive, tmp_path / f"{archive.name}.files")
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as read:
        assert {entry.mtime for entry in read} == {0}


def test_unpacking_prints_the_path_to_use(tmp_path):
    kit = a_kit(tmp_path / "kit", python=".".join(platform.python_version_tuple()[:2]))
    done = subprocess.run(
        [str(BENCHMARKS.parent / "tools/gpu_unpack.sh"), str(kit), str(tmp_path / "site")],
        env={"PATH": "/usr/bin:/bin", "TANDEM_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    site, engine, *others = done.stdout.strip().split(":")
    assert site == str(tmp_path / "site")
    assert engine.endswith("/engine")
    assert others[-1] == str(BENCHMARKS)
    assert (tmp_path / "site/one/module.so").exists()


def test_kernels_of_a_kit_are_found_where_they_are_unpacked(tmp_path):
    """Triton's list of the files of a kernel has absolute paths: elsewhere it would compile the kernel again."""
    cache = tmp_path / KERNELS
    entry = cache / "KEY"
    entry.mkdir(parents=True)
    names = [f"split_kernel.{kind}" for kind in ("source", "ttir", "ptx", "cubin", "json")]
    for file in names:
        (entry / file).write_text("{}")
    listed = {file: f"/where/it/was/made/KEY/{file}" for file in names}
    (entry / "__grp__split_kernel.json").write_text(json.dumps({"child_paths": listed}))
    (cache / "LAUNCHER").mkdir()
    (cache / "LAUNCHER" / "__triton_launcher.so").touch()
    assert pack.strip(cache) == 1
    assert {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()} == {
        "KEY/split_kernel.json",
        "KEY/split_kernel.cubin",
    }
    kit, site = tmp_path / "kit", tmp_path / "site"
    kit.mkdir()
    archive = kit / f"{KERNELS}.tar.xz"
    with tarfile.open(archive, "w:xz") as made:
        made.add(cache, KERNELS)
    python = ".".join(platform.python_version_tuple()[:2])
    manifest = Manifest(
        commit="c", python=python, versions={}, files=[Packed.of(archive)], tree_bytes=0, kernels=1, triton="t"
    )
    manifest.write(kit)
    unpack.unpack(kit, site)
    there = site / KERNELS
    listed = json.loads((there / "KEY" / "__grp__split_kernel.json").read_text())["child_paths"]
    assert listed == {name: str(there / "KEY" / name) for name in ("split_kernel.cubin", "split_kernel.json")}
    assert there.stat().st_mode & 0o777 == 0o700, "a kernel is code, so engines refuse folders of others"


@pytest.mark.slow
def test_moved_kernels_are_those_that_a_launch_looks_for(tmp_path):
    """In a fresh process and another folder nothing is compiled; what has changed since then is, so that a kit of
    another tree costs time alone."""
    made, moved = tmp_path / "made", tmp_path / "moved"
    first = launched("digests 8B", made)
    count = first["compiled"]
    assert (first["why"], count >= 2, first["bytes"] < 3 << 30) == ("", True, True)
    assert pack.strip(made) == count
    shutil.move(made, moved)
    assert unpack.adopt(moved) == count
    engine = tmp_path / "engine"
    shutil.copytree(BENCHMARKS.parent / "engine", engine, ignore=shutil.ignore_patterns("__pycache__"))
    again = launched("digests 8B", moved, engine)
    assert (again["found"], again["compiled"]) == (count + first["found"], 0)
    changed = engine / "tandem_engine" / "disaggregation" / "digest_triton.py"
    changed.write_text(changed.read_text().replace("\n@triton.jit", "\n# As of now.\n@triton.jit", 1))
    assert launched("digests 8B", moved, engine)["compiled"] == count


def launched(source, cache, *before):
    """What a process of one source compiled, for a GPU that is not there."""
    pytest.importorskip("triton")
    paths = [*map(str, before), str(BENCHMARKS), *(entry for entry in sys.path if entry)]
    environment = {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu.kit.kernels", "--source", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_of_every_measured_model_are_compiled():
    kernels, loads = importlib.import_module("gpu.kit.kernels"), importlib.import_module("gpu.parts.engine").LOADS
    plain = {shape for shape, options in kernels.ENGINES if not options}
    float8 = {shape for shape, options in kernels.ENGINES if options == {"kv_cache_dtype": "fp8"}}
    assert plain == {*loads}
    assert float8 == {shape for shape, each in loads.items() if each.float8}
