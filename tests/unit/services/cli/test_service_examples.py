"""The unit of systemd and the compose file: their commands exist, and their own tools accept them."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tandem_services.cli.main import build_parser
from tandem_testing.service_examples import COMPOSE, UNIT, compose, unit, unit_command

ROOT = Path(__file__).parents[4]


def output_of(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_unit_starts_tandem_up_in_its_state_folder(tmp_path):
    args = build_parser().parse_args(unit_command(tmp_path))
    assert args.run_dir == tmp_path / "tandem/run"
    service = unit()["Service"]
    assert service["StateDirectory"] == service["CacheDirectory"] == "tandem"
    assert (service["Type"], service["DynamicUser"], service["KillMode"]) == ("notify", "yes", "mixed")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_unit_is_accepted_by_systemd(tmp_path):
    # Of the file that it runs systemd verifies only that it exists.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/tandem/bin/tandem", str(shutil.which("true"))))
    done = output_of("systemd-analyze", "verify", "--man=no", str(copy))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_compose_file_runs_commands_and_images_that_exist():
    services = compose()["services"]
    args = build_parser().parse_args(services["tandem"]["command"])
    assert args.redis_url == "redis://redis:6379/0"
    assert services["tandem"]["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]
    assert "ports" not in services["redis"]
    assert [compose()["networks"][name]["internal"] for name in services["redis"]["networks"]] == [True]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {one["image"] for one in services.values()} == {
        f"ghcr.io/tandem-serving/{name}:{version}" for name in ("redis", "engine")
    }
    assert set(services["tandem"]["depends_on"]) <= services.keys()
    assert {name for one in services.values() for name in one["networks"]} == compose()["networks"].keys()


def test_compose_file_is_accepted_by_docker():
    docker = shutil.which("docker")
    if docker is None or output_of(docker, "compose", "version").returncode != 0:
        pytest.skip("docker compose is not installed")
    done = output_of(docker, "compose", "-f", str(COMPOSE), "config", "--quiet")
    assert done.returncode == 0, done.stderr
