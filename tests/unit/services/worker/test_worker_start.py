from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress
from tandem_services.worker.config import WorkerConfig, new_incarnation
from tandem_services.worker.engine_process import engine_argv


def config(**changes) -> WorkerConfig:
    fields = {
        "model_path": "/m",
        "model_name": "mini",
        "role": Role.PREFILL,
        "worker_id": "w1",
        "redis": RedisAddress(url="redis://h"),
    }
    return WorkerConfig(**fields | changes)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"worker_id": "a b"}, "--worker-id"),
        ({"worker_id": "w@1"}, "--worker-id"),
        ({"cluster": ""}, "--cluster"),
        ({"model_name": ""}, "--served-model-name"),
        ({"health_port": 70000}, "--health-port"),
        ({"request_port": -1}, "--request-port"),
        ({"drain_timeout_s": 0.0}, "--drain-timeout"),
        ({"start_timeout_s": float("nan")}, "--start-timeout"),
    ],
)
def test_invalid_worker_setting_is_rejected_by_its_flag(change, flag):
    with pytest.raises(ConfigError, match=flag):
        config(**change)


def test_incarnations_grow_and_have_equal_length():
    names = [new_incarnation("w1") for _ in range(5)]
    numbers = [name.removeprefix("w1@") for name in names]
    assert all(len(number) == 19 for number in numbers)
    assert new_incarnation("w1") > names[0]
    assert len(set(names)) == 5


def test_engine_gets_the_workers_flags_and_then_its_own_verbatim():
    argv = engine_argv(
        config(curve_keys=Path("/k"), engine_flags=("--page-size", "32")), incarnation="w1@7", control="ipc:///c"
    )
    assert argv[1:4] == ["-m", "tandem_engine.cli", "serve"]
    flags = dict(zip(argv[4:-2:2], argv[5:-2:2], strict=True))
    assert flags == {
        "--model": "/m",
        "--role": "prefill",
        "--worker-id": "w1",
        "--incarnation": "w1@7",
        "--host": "127.0.0.1",
        "--request-port": "0",
        "--peer-port": "0",
        "--control": "ipc:///c",
        "--log-format": "plain",
        "--curve-keys": "/k",
    }
    assert argv[-2:] == ["--page-size", "32"]


def test_without_keys_no_key_file_is_passed():
    assert "--curve-keys" not in engine_argv(config(), incarnation="w1@7", control="ipc:///c")


def test_real_engine_accepts_worker_flags():
    from tandem_engine.cli import build_parser

    argv = engine_argv(config(curve_keys=Path("/k")), incarnation="w1@7", control="ipc:///c")
    parsed = build_parser().parse_args(argv[3:])
    assert (parsed.worker_id, parsed.incarnation, parsed.control) == ("w1", "w1@7", "ipc:///c")
