"""The counter of compiled kernels, by itself; as Triton drives it: `tests/differential/test_warm_engine.py`."""

import logging
from types import SimpleNamespace

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.kernels.compiles import (
    CompileCounter,
    Compiles,
    is_private,
    key_of,
    require_private_cache,
    require_private_kernels,
)

SOURCE = SimpleNamespace(
    name="some_kernel",
    signature={"x": "*bf16", "count": "i32", "stride": "i32", "SIZE": "constexpr"},
    constants={(3,): 64},
    attrs={(0,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]},
)
OPTIONS = {"num_warps": 4, "num_stages": 3}
TIMES = SimpleNamespace(total=2_500_000)


def compile_one(counter: CompileCounter, *, cache_hit: bool = False) -> None:
    counter.compiled(src=SOURCE, metadata=OPTIONS, metadata_group={}, times=TIMES, cache_hit=cache_hit)


def test_kernels_before_serving_are_counted_quietly(caplog):
    counter = CompileCounter()
    compile_one(counter)
    compile_one(counter, cache_hit=True)
    assert counter.counts == Compiles(starting=2)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_kernel_while_serving_is_a_warning_with_its_key(caplog):
    counter = CompileCounter()
    compile_one(counter)
    counter.serve()
    compile_one(counter)
    assert counter.counts == Compiles(starting=1, serving=1)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert record.getMessage() == (
        "kernel some_kernel was compiled while serving: requests waited for it, in 2.500 s; its key: "
        "(x: *bf16/16, count: i32, stride: i32/16, SIZE=64), 4 warps, 3 stages"
    )


def test_kernel_read_from_disk_while_serving_counts_too(caplog):
    counter = CompileCounter()
    counter.serve()
    compile_one(counter, cache_hit=True)
    assert counter.counts == Compiles(serving=1)
    assert "was read from Triton's cache while serving" in caplog.text


def test_key_of_a_kernel_without_constants_has_its_types():
    source = SimpleNamespace(signature={"x": "*fp32"}, constants={}, attrs={})
    assert key_of(source, OPTIONS) == "(x: *fp32), 4 warps, 3 stages"


def test_folder_of_kernels_is_made_for_this_user_alone(tmp_path):
    folder = tmp_path / "volume" / "triton"
    for _ in range(2):
        require_private_cache(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("owner", "group", "mode", "private"),
    [
        (10001, 0, 0o700, True),
        (10001, 0, 0o755, True),
        (10001, 10001, 0o2770, True),  # fsGroup of a pod
        (10001, 10001, 0o2777, False),
        (10001, 100, 0o770, False),
        (10001, 10001, 0o707, False),
        (10002, 10001, 0o700, False),
        (0, 10001, 0o770, False),
    ],
)
def test_folder_is_private_if_only_its_user_may_write(owner, group, mode, private):
    status = SimpleNamespace(st_uid=owner, st_gid=group, st_mode=0o040000 | mode)
    assert is_private(status, 10001) is private


def test_group_of_root_is_not_the_user_alone():
    assert not is_private(SimpleNamespace(st_uid=0, st_gid=0, st_mode=0o040770), 0)


@pytest.mark.parametrize("mode", [0o707, 0o777])
def test_folder_of_kernels_that_others_may_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}: others may write kernels there"):
        require_private_cache(tmp_path)


def test_folder_of_kernels_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        require_private_cache(tmp_path)


def test_folder_of_kernels_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR .* cannot be used"):
        require_private_cache(tmp_path / "file" / "triton")


def test_triton_has_a_folder_of_its_own_before_the_first_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    require_private_kernels()
    assert (tmp_path / "triton").stat().st_mode & 0o777 == 0o700
