"""The wheel with a Valkey server: what it holds, and programs that it refuses."""

import os
import re
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.valkey_wheel import NEEDS_READELF, install_wheel, wheel_tool, write_wheel

pytestmark = [NEEDS_READELF, pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")]


def server(tmp_path: Path, **fields: object):
    given = {"program": "Valkey", "version": "9.1.2", "libraries": ("libc.so.6", "libm.so.6"), "glibc": (2, 34)}
    (tmp_path / "program").write_bytes(b"\x7fELF")
    return wheel_tool().Server(path=tmp_path / "program", **(given | fields))


def test_wheel_has_program_licenses_and_one_function(tmp_path):
    wheel = write_wheel(tmp_path)
    assert write_wheel(tmp_path).read_bytes() == wheel.read_bytes()
    site = install_wheel(wheel, tmp_path / "site")
    [info] = site.glob("*.dist-info")
    installed = PathDistribution(info)
    assert installed.metadata["Name"] == "tandem-llm-valkey"
    assert "BSD-3-Clause" in installed.metadata["License-Expression"]
    assert (info / "licenses/copyright").is_file()
    program = site / "tandem_llm_valkey/valkey-server"
    assert program.read_bytes() == Path(str(REDIS_SERVER)).read_bytes()
    assert os.access(program, os.X_OK)
    with zipfile.ZipFile(wheel) as archive:
        code = [name for name in archive.namelist() if name.endswith(".py")]
    assert code == ["tandem_llm_valkey/__init__.py"]


def test_wheel_tag_follows_the_symbols_of_the_program(tmp_path):
    assert re.fullmatch(r"py3-none-manylinux_2_34_\w+", server(tmp_path).tag)
    assert re.fullmatch(r"py3-none-linux_\w+", server(tmp_path, libraries=("libc.so.6", "libssl.so.3")).tag)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"program": "Redis"}, "is Redis, and the distribution has Valkey"),
        ({"libraries": ("libc.so.6", "libssl.so.3", "libsystemd.so.0")}, r"needs libssl\.so\.3, libsystemd\.so\.0"),
    ],
)
def test_program_that_does_not_run_everywhere_is_refused(tmp_path, fields, sentence):
    with pytest.raises(SystemExit, match=sentence):
        server(tmp_path, **fields).require_publishable()


def test_program_that_is_too_large_is_refused(tmp_path):
    large = server(tmp_path)
    large.require_publishable()
    with large.path.open("ab") as program:
        program.truncate(5 << 20)
    with pytest.raises(SystemExit, match="strip it"):
        large.require_publishable()


def test_file_that_is_no_server_is_refused(tmp_path):
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 'Redis Insight 2'\n")
    other.chmod(0o755)
    with pytest.raises(SystemExit, match="is no Valkey server: --version prints 'Redis Insight 2"):
        wheel_tool().Server.read(other)
