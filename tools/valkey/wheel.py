#!/usr/bin/env python3
"""Packs a valkey-server into a wheel, the distribution `tandem-llm-valkey`.

    tools/valkey/wheel.py valkey-server --copyright debian/copyright --out dist

The wheel has the program, a function that returns its path, and the licenses of all that is compiled into it. Its
platform tag follows from the glibc symbols that the program needs. A program that is too large or needs other shared
libraries than glibc is refused. Equal inputs give equal bytes. Needs readelf.
"""

import argparse
import base64
import hashlib
import platform
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION, PACKAGE = "tandem-llm-valkey", "tandem_llm_valkey"
MAX_BYTES = 4 << 20
GLIBC = re.compile(r"(libc|libm|libdl|librt|libpthread)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")
"""Libraries of every Linux that the tag allows."""

INIT = Path(__file__).parent / PACKAGE / "__init__.py"
EPOCH = (1980, 1, 1, 0, 0, 0)

METADATA = """\
Metadata-Version: 2.4
Name: {distribution}
Version: {version}
Summary: A Valkey server for Tandem on one machine
License-Expression: BSD-3-Clause AND BSD-2-Clause AND MIT AND ISC AND BSL-1.0 AND Zlib AND CC0-1.0
License-File: copyright
Requires-Python: >=3.11
Classifier: Operating System :: POSIX :: Linux

{program} {version} without TLS, systemd and jemalloc, built from Debian's source package. `tandem up` starts it where
neither redis-server nor valkey-server is installed. SHA-256 of the program: {digest}
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A program that can be packed."""

    path: Path
    program: str
    """`Valkey` or `Redis`."""
    version: str
    libraries: tuple[str, ...]
    """That it loads."""
    glibc: tuple[int, int]
    """The newest version of glibc's symbols."""

    @classmethod
    def read(cls, path: Path) -> "Server":
        """Raises `SystemExit` for a file that is no such server."""
        printed = subprocess.run([path.absolute(), "--version"], capture_output=True, text=True, check=False).stdout
        found = re.match(r"(Valkey|Redis) server v=([\d.]+) ", printed)
        if found is None:
            raise SystemExit(f"{path} is no Valkey server: --version prints {printed[:200]!r}")
        dynamic = _readelf("--dynamic", path)
        symbols = re.findall(r"GLIBC_(\d+)\.(\d+)", _readelf("--version-info", path))
        return cls(
            path=path,
            program=found[1],
            version=found[2],
            libraries=tuple(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)),
            glibc=max((int(major), int(minor)) for major, minor in symbols),
        )

    @property
    def foreign_libraries(self) -> tuple[str, ...]:
        return tuple(name for name in self.libraries if not GLIBC.fullmatch(name))

    @property
    def tag(self) -> str:
        """`linux` where it needs more than glibc: an index refuses it."""
        system = "linux" if self.foreign_libraries else "manylinux_{}_{}".format(*self.glibc)
        return f"py3-none-{system}_{platform.machine()}"

    def require_publishable(self) -> None:
        """Raise `SystemExit` for a program that would not run everywhere."""
        if self.program != "Valkey":
            raise SystemExit(f"{self.path} is {self.program}, and the distribution has Valkey")
        if self.foreign_libraries:
            raise SystemExit(
                f"{self.path} needs {', '.join(self.foreign_libraries)}: build it by tools/valkey/build.sh"
            )
        size = self.path.stat().st_size
        if size > MAX_BYTES:
            raise SystemExit(f"{self.path} has {size} bytes, and {MAX_BYTES} are allowed: strip it")


def _readelf(*arguments: object) -> str:
    return subprocess.run(
        ["readelf", "--wide", *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout


def write_wheel(server: Server, *, copyright_file: Path, out: Path) -> Path:
    """Returns the path of the wheel."""
    program = server.path.read_bytes()
    info = f"{PACKAGE}-{server.version}.dist-info"
    digest = hashlib.sha256(program).hexdigest()
    metadata = METADATA.format(
        distribution=DISTRIBUTION, version=server.version, program=server.program, digest=digest
    ).encode()
    wheel = (
        f"Wheel-Version: 1.0\nGenerator: tools/valkey/wheel.py\nRoot-Is-Purelib: false\nTag: {server.tag}\n".encode()
    )
    files = [
        (f"{PACKAGE}/__init__.py", INIT.read_bytes(), 0o644),
        (f"{PACKAGE}/valkey-server", program, 0o755),
        (f"{info}/METADATA", metadata, 0o644),
        (f"{info}/WHEEL", wheel, 0o644),
        (f"{info}/licenses/copyright", copyright_file.read_bytes(), 0o644),
    ]
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content, _ in files)
    files.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode(), 0o644))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{PACKAGE}-{server.version}-{server.tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="a stripped valkey-server")
    parser.add_argument("--copyright", type=Path, required=True, help="licenses of all that is compiled into it")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheel (default: dist)")
    args = parser.parse_args()
    server = Server.read(args.program)
    server.require_publishable()
    print(write_wheel(server, copyright_file=args.copyright, out=args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
