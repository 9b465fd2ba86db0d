"""Each check of `tandem doctor` finds what is wrong, and is ok once its fix was applied."""

import resource
import socket
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem_engine.base.cgroups import memory_limit
from tandem_services.cli.doctor import processor, resources, services, software
from tandem_services.cli.doctor.finding import Check, Finding, Machine, Status, ok, run_all
from tandem_services.common.errors import StartupError
from tandem_services.common.redis_client import RedisAddress
from tandem_testing.redis_calls import documented_rules
from tandem_testing.redis_fleets import grant
from tandem_testing.redis_server import REDIS_SERVER, RedisServer

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.54.03  Wed Aug  6 2025\n"


@pytest.fixture
def machine(tmp_path) -> Machine:
    """With nothing wrong, four cores, and no GPU."""
    files = {
        "proc/cpuinfo": f"processor\t: 0\nflags\t\t: {V3}\n",
        "proc/loadavg": "0.50 0.4 0.3 1/100 1\n",
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n",
        "proc/self/cgroup": "0::/tandem.slice\n",
        "cgroup/tandem.slice/cpu.max": "max 100000\n",
        "cgroup/tandem.slice/memory.max": "max\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return Machine(
        proc=tmp_path / "proc",
        cgroup=tmp_path / "cgroup",
        dev=tmp_path / "dev",
        cpus=frozenset(range(4)),
        variables={"HOME": str(tmp_path)},
        version_of={"torch": "2.13.0"}.get,
    )


def add_gpu(machine: Machine, *, driver: int | None = 580) -> None:
    (machine.dev / "nvidia0").touch()
    if driver is not None:
        (machine.proc / "driver/nvidia").mkdir(parents=True)
        (machine.proc / "driver/nvidia/version").write_text(DRIVER.format(driver))


def assert_found(finding: Finding, status: Status, fact: str, fix: str) -> None:
    assert finding.status is status, finding
    assert fact in finding.fact, finding
    assert fix in finding.fix, finding


def assert_ok(finding: Finding, fact: str = "") -> None:
    assert (finding.status, finding.fix) == (Status.OK, ""), finding
    assert fact in finding.fact


def test_old_python_or_another_system_fails():
    assert_found(software.python((3, 10, 9), "linux"), Status.FAIL, "Python 3.10.9", "install Python 3.11 or later")
    assert_found(software.python((3, 12, 0), "darwin"), Status.FAIL, "darwin", "on Linux")
    assert_ok(software.python((3, 11, 0), "linux"))


def test_missing_module_of_the_engine_fails():
    finding = software.packages(("json", "no_such_module"))
    assert_found(finding, Status.FAIL, "missing for an engine: no_such_module", "pip install 'tandem-llm[engine]'")
    assert_ok(software.packages(("json",)))


def test_torch_without_cuda_on_gpu_machine_is_a_warning(machine):
    cpu_build = replace(machine, version_of={"torch": "2.13.0+cpu"}.get)
    assert_ok(software.torch_build(cpu_build, None), "no NVIDIA GPU")
    add_gpu(machine)
    fix = "pip uninstall -y torch && pip install 'tandem-llm[engine]'"
    assert_found(software.torch_build(cpu_build, None), Status.WARN, "without CUDA, and an NVIDIA GPU", fix)
    assert_ok(software.torch_build(machine, (13, 0)), "CUDA 13.0")
    none = replace(machine, version_of={}.get)
    assert_found(software.torch_build(none, None), Status.FAIL, "not installed", "tandem-llm[engine]")


@pytest.mark.parametrize(("build", "cuda"), [("cuda: Optional[str] = '13.0'", (13, 0)), ("cuda = None", None)])
def test_cuda_of_torch_is_read_without_importing_it(tmp_path, monkeypatch, build, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.13.0'\n{build}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert software.torch_cuda() == cuda


def test_driver_that_is_too_old_for_torch_fails(machine):
    assert_ok(software.driver(machine, (13, 0)), "no NVIDIA GPU")
    add_gpu(machine, driver=570)
    assert_found(
        software.driver(machine, (13, 0)), Status.FAIL, "driver 570.54 is older than 580", "install driver 580"
    )
    assert_ok(software.driver(machine, (12, 8)), "driver 570.54")
    (machine.proc / "driver/nvidia/version").write_text(DRIVER.format(580))
    assert_ok(software.driver(machine, (13, 0)))
    (machine.proc / "driver/nvidia/version").unlink()
    assert_found(software.driver(machine, (13, 0)), Status.WARN, "does not name the driver", "nvidia-smi")


@pytest.mark.parametrize(
    ("flags", "status", "fact"),
    [
        ("fpu sse2", Status.FAIL, "no SSE 4.2"),
        (V2, Status.WARN, "no AVX2"),
        (V3, Status.OK, "x86-64-v3"),
        (f"{V4} avx512_bf16", Status.OK, "x86-64-v4 with bfloat16"),
    ],
)
def test_level_of_the_cpu_follows_from_its_flags(machine, flags, status, fact):
    (machine.proc / "cpuinfo").write_text(f"flags : {flags}\n")
    finding = processor.level(machine)
    assert (finding.status, bool(finding.fix)) == (status, status is not Status.OK)
    assert fact in finding.fact


def test_fewer_than_two_usable_cores_are_warned_of(machine):
    assert_ok(processor.cores(machine), "4 CPUs")
    quota = machine.cgroup / "tandem.slice/cpu.max"
    quota.write_text("150000 100000\n")
    assert_found(processor.cores(machine), Status.WARN, "4 CPUs, a quota of 1.5", "--both 1, or a higher quota")
    quota.write_text("250000 100000\n")
    assert_ok(processor.cores(machine), "4 CPUs, a quota of 2.5")
    assert_found(processor.cores(replace(machine, cpus=frozenset({0}))), Status.WARN, "1 CPUs", "--both 1")


def test_machine_that_computes_something_else_is_warned_of(machine):
    assert_ok(processor.load(machine))
    (machine.proc / "loadavg").write_text("9.00 8 7 1/100 1\n")
    assert_found(processor.load(machine), Status.WARN, "load 9 on 4 cores", "stop what else")


def test_little_memory_or_a_low_cgroup_limit_is_warned_of(machine):
    assert_ok(resources.memory(machine), "8.0 GiB available")
    limit = machine.cgroup / "tandem.slice/memory.max"
    limit.write_text(f"{1 << 30}\n")
    assert_found(resources.memory(machine), Status.WARN, "1.0 GiB allowed by the cgroup", "--both 1")
    limit.write_text(f"{4 << 30}\n")
    assert_ok(resources.memory(machine))
    (machine.proc / "meminfo").write_text("MemAvailable: 1024 kB\n")
    assert_found(resources.memory(machine), Status.WARN, "0.0 GiB available", "--kv-cache-gib")


def test_memory_limit_of_the_older_cgroups_is_read(machine):
    (machine.proc / "self/cgroup").write_text("4:memory:/pod\n")
    limit = machine.cgroup / "memory/pod/memory.limit_in_bytes"
    limit.parent.mkdir(parents=True)
    limit.write_text("9223372036854771712\n")
    assert memory_limit(proc=machine.proc, cgroups=machine.cgroup) is None
    limit.write_text(f"{1 << 30}\n")
    assert memory_limit(proc=machine.proc, cgroups=machine.cgroup) == 1 << 30


def test_shared_memory_that_is_small_or_missing_is_named(machine):
    folder = machine.dev / "shm"
    assert_found(resources.shared_memory(folder, minimum=1 << 62), Status.WARN, "GiB free", "--shm-size=512m")
    assert_ok(resources.shared_memory(folder, minimum=1))
    folder.rmdir()
    assert_found(resources.shared_memory(folder), Status.FAIL, "is no folder", "mount -t tmpfs tmpfs /dev/shm")


def test_folder_that_cannot_be_made_or_is_full_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert_found(resources.disk(tmp_path / "file/run", "--run-dir DIR"), Status.FAIL, "no folder", "--run-dir DIR")
    assert_ok(resources.disk(tmp_path / "other/run", "--run-dir DIR", minimum=1))
    full = resources.disk(tmp_path, "--run-dir DIR", minimum=1 << 62)
    assert_found(full, Status.WARN, "GiB free", "free some, or --run-dir DIR")
    assert [each.name for each in tmp_path.iterdir()] == ["file"], "the check made a folder"


def test_low_limit_of_open_files_is_warned_of():
    assert_found(resources.open_files(1024), Status.WARN, "at most 1024 open files", "LimitNOFILE=65536")
    assert_ok(resources.open_files(65536))
    assert_ok(resources.open_files(resource.RLIM_INFINITY))


def test_low_limit_of_processes_is_warned_of():
    assert_found(resources.processes((100, 200)), Status.WARN, "100 of at most 200", "podPidsLimit")
    assert_ok(resources.processes((100, 1000)))
    assert_ok(resources.processes(None))


def test_locked_memory_matters_where_devices_read_it(machine):
    assert_ok(resources.locked_memory(machine, 8 << 20))
    (machine.dev / "infiniband").mkdir()
    (machine.dev / "infiniband/uverbs0").touch()
    assert_found(resources.locked_memory(machine, 8 << 20), Status.WARN, "8 MiB", "LimitMEMLOCK=infinity")
    assert_ok(resources.locked_memory(machine, resource.RLIM_INFINITY))


def test_missing_redis_is_reported_with_install_command(tmp_path):
    def find() -> str:
        raise StartupError("neither is installed; Tandem needs Redis: run 'apt-get install redis-server'")

    assert_found(services.redis_program(find), Status.FAIL, "neither is installed", "apt-get install redis-server")
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho Redis server v=7.0.15 sha=0\n")
    program.chmod(0o755)
    assert_ok(services.redis_program(lambda: str(program)), "7.0.15")


@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
def test_named_redis_fails_until_it_runs_and_has_functions():
    server = RedisServer.start("--rename-command", "FCALL", "")
    try:
        finding = services.redis_server(RedisAddress(url=server.url))
        assert_found(finding, Status.FAIL, "", "start Redis 7 or later there")
        server.kill()
        assert services.redis_server(RedisAddress(url=server.url)).status is Status.FAIL
        server.extra = ()
        server.restart()
        grant([server], documented_rules(), user="tandem", password="secret")
        assert_ok(services.redis_server(RedisAddress(url=server.url.replace("//", "//tandem:secret@"))), "functions")
        assert_ok(services.redis_server(RedisAddress(url=server.url)), "has functions")
    finally:
        server.stop()


def test_nixl_that_moves_nothing_is_named_with_its_reason():
    broken = (sys.executable, "-c", "import sys; sys.exit('NIXL cannot be loaded (no libucp)')")
    assert_found(services.nixl_loopback(broken), Status.FAIL, "NIXL cannot be loaded (no libucp)", "--transport none")
    assert_ok(services.nixl_loopback((sys.executable, "-c", "print('moved')")), "moved")


def test_module_of_the_nixl_check_exists():
    """tests/integration/test_nixl_transport.py runs it."""
    assert find_spec(services.LOOPBACK_MODULE) is not None


def test_port_in_use_fails_until_it_is_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_found(services.api_port("127.0.0.1", port), Status.FAIL, f"127.0.0.1:{port}", "--port 0")
    assert_ok(services.api_port("127.0.0.1", port), "is free")


def test_hub_cache_that_cannot_be_written_is_warned_of(machine, tmp_path):
    (tmp_path / "file").touch()
    broken = replace(machine, variables={"HF_HOME": str(tmp_path / "file")})
    assert_found(services.hub_cache(broken), Status.WARN, "may not write", "HF_HOME=DIR")
    cache = tmp_path / "hf/hub/models--org--mini"
    cache.mkdir(parents=True)
    mended = replace(machine, variables={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    assert_ok(services.hub_cache(mended), f"1 models in {tmp_path / 'hf/hub'}, offline")


def test_hub_token_is_never_shown(machine, tmp_path):
    assert_ok(services.hub_token(machine), "no token")
    assert services.hub_token(replace(machine, variables={"HF_TOKEN": "hf_canary"})) == ok("a token in HF_TOKEN")
    file = tmp_path / ".cache/huggingface/token"
    file.parent.mkdir(parents=True)
    file.write_text("hf_canary")
    file.chmod(0o644)
    finding = services.hub_token(machine)
    assert_found(finding, Status.WARN, "other users may read", f"chmod 600 {file}")
    assert "canary" not in str(finding)
    file.chmod(0o600)
    assert_ok(services.hub_token(machine), str(file))


def test_check_that_hangs_or_cannot_read_is_a_warning():
    release = threading.Event()

    def hang() -> Finding:
        release.wait()
        return ok("")

    def unreadable() -> Finding:
        return ok(Path("/nowhere/at/all").read_text())

    try:
        checks = [Check(name="a", probe=hang, limit_s=0.01), Check(name="b", probe=unreadable)]
        hung, unread = run_all([*checks, Check(name="c", probe=lambda: ok("fine"))])[:2]
    finally:
        release.set()
    assert_found(hung, Status.WARN, "no answer within 0.01 s", "try again")
    assert_found(unread, Status.WARN, "/nowhere/at/all", "run as the user")


def printing(text: str, status: int, *, errors: str = "") -> tuple[str, ...]:
    return ("sh", "-c", 'printf "$1"; printf "$2" >&2; exit "$3"', "sh", text, errors, str(status))


def test_kernels_that_are_missing_are_counted():
    command = printing("missing  build(a=1)\\npresent  store(int64)\\n", 1)
    assert_found(processor.kernels(command), Status.WARN, "1 of 2 kernels", "tandem kernels build")
    assert_found(processor.kernels(printing("present  store(int64)\\n", 0)), Status.OK, "all 1 kernels", "")
    command = printing("", 3, errors="numba is missing\\n")
    assert_found(processor.kernels(command), Status.WARN, "cannot be listed: numba is missing", "tandem kernels list")


def test_kernels_that_hang_while_listed_are_a_warning(monkeypatch):
    monkeypatch.setattr(processor, "LISTING_LIMIT_S", 0.01)
    assert_found(processor.kernels(("sleep", "60")), Status.WARN, "not listed within", "idle")
