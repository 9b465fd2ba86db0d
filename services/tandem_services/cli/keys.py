"""`tandem keys`: creates API keys and their entries in a key file, and key files of deployments. Needs no server."""

import argparse
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import positive_int
from tandem_services.common.errors import StartupError
from tandem_services.common.private_folder import new_contents

EXAMPLES = """\
examples:
  tandem keys create search --requests-per-minute 600 --tokens-per-minute 200000 --file keys.json
                                               a new key on stderr, once; its entry in the file
  tandem keys create search                    the entry on stdout, for a file that you write
  tandem keys hash < key.txt                   the digest of a key that you have
  tandem keys check /etc/tandem/keys           read a key file, or a mounted Secret, as a gateway would
  tandem keys deployment keys.json             a new key file of a deployment, for --curve-keys

The key file of API keys is JSON: {"keys": [ENTRY, …]}. docs/limits.md describes every field.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys",
        help="create, hash and check API keys, create key files of deployments",
        description="Create API keys for `tandem gateway --api-keys`, check a key file, and create the key file of a "
        "deployment.",
        epilog=EXAMPLES,
    )
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True)
    create = orders.add_parser(
        "create", help="create a key: the key is written to stderr, its entry to --file or stdout"
    )
    create.add_argument("name", metavar="NAME", help="name of the tenant in logs, metrics and Redis")
    create.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="key file for the entry; created if missing (default: stdout)",
    )
    for limit, what in (
        ("requests-per-minute", "POST requests"),
        ("tokens-per-minute", "prompt and output tokens"),
        ("concurrency", "requests at once"),
    ):
        create.add_argument(f"--{limit}", type=positive_int, metavar="N", help=f"{what} (default: no limit)")
    create.add_argument(
        "--model",
        dest="models",
        action="append",
        metavar="NAME",
        help="model that the tenant may use; repeatable (default: all)",
    )
    create.add_argument("--admin", action="store_true", help="allow the administrators' routes")
    orders.add_parser("hash", help="read a key from stdin and print its digest")
    check = orders.add_parser("check", help="list the tenants of a key file; exit status 1 if it is invalid")
    check.add_argument("path", type=Path, metavar="PATH", help="file, or directory of .json files")
    deployment = orders.add_parser(
        "deployment", help="write a new key file for the sockets between the processes of a deployment"
    )
    deployment.add_argument("path", type=Path, metavar="FILE", help="new file, for --curve-keys of all processes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    match args.order:
        case "create":
            return _create(args)
        case "hash":
            return _hash()
        case "deployment":
            return _new_deployment(args.path)
        case _:
            return _check(args.path)


def _create(args: argparse.Namespace) -> int:
    import msgspec

    from tandem_services.gateway.access.keys import digest_of, new_key
    from tandem_services.gateway.access.tenants import Tenant

    key = new_key()
    asked = {name: getattr(args, name) for name in ("requests_per_minute", "tokens_per_minute", "concurrency")}
    asked |= {"models": args.models, "admin": args.admin or None}
    entry = {"name": args.name, "sha256": [digest_of(key)]} | {k: v for k, v in asked.items() if v is not None}
    try:
        msgspec.convert(entry, Tenant)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no gateway would take this entry: {error}") from error
    if args.file is None:
        print(json.dumps(entry))
    else:
        _add_entry(args.file, entry)
    print(f"key of {args.name}, shown only now: {key}", file=sys.stderr)
    return 0


def _new_deployment(path: Path) -> int:
    """Raises `ConfigError` where there is a file already: a deployment does not survive the loss of its keys."""
    from tandem_engine.ipc.keys import KeyPair

    if path.exists():
        raise ConfigError(f"{path} exists already; name another file, or remove it if no deployment uses it")
    try:
        KeyPair.generate().save(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return 0


def _add_entry(path: Path, entry: dict[str, Any]) -> None:
    """All of the new file or none of it is there at any time: a gateway may follow it.

    Raises `ConfigError` for a file that cannot be read or written, or that no gateway would take afterwards.
    """
    from tandem_services.gateway.access.keys import KeyFileError, parse_keys

    path = path.resolve()
    try:
        with _alone_with(path):
            there = path.stat() if path.exists() else None
            before = b'{"keys": []}' if there is None else path.read_bytes()
            if there is not None:
                parse_keys({path.name: before})
            content = json.dumps({"keys": [*json.loads(before)["keys"], entry]}, indent=1).encode() + b"\n"
            parse_keys({path.name: content})
            _replace(path, content, there)
    except KeyFileError as error:
        raise ConfigError(f"--file {error}") from error
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror}") from error


@contextmanager
def _alone_with(path: Path) -> Iterator[None]:
    """Of two that add an entry at once, the second waits and reads what the first has written.

    It is the folder that is locked: a lock of the file would go with the file that is replaced. Where folders have no
    locks, as on some network file systems, the second is refused.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _locked(descriptor):
            yield
        else:
            with _sign_beside(path):
                yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextmanager
def _sign_beside(path: Path) -> Iterator[None]:
    """A file that only one process can make. Raises `ConfigError` while there is one."""
    sign = path.with_name(f".{path.name}.lock")
    try:
        sign.touch(mode=0o600, exist_ok=False)
    except FileExistsError as error:
        raise ConfigError(
            f"--file {path}: another `tandem keys create` changes it, and folders have no locks there to wait for. "
            f"Try again; if none runs, one was killed, and you may remove {sign}"
        ) from error
    try:
        yield
    finally:
        sign.unlink(missing_ok=True)


def _replace(path: Path, content: bytes, former: os.stat_result | None) -> None:
    """Only its owner can read the new file before it has the former's permissions; 0600 where there was none."""
    with new_contents(path) as file:
        if former is not None:
            _give_to_owner_of(former, file.fileno(), path)
        file.write(content)


def _give_to_owner_of(former: os.stat_result, descriptor: int, path: Path) -> None:
    own = os.fstat(descriptor)
    try:
        if (own.st_uid, own.st_gid) != (former.st_uid, former.st_gid):
            os.fchown(descriptor, former.st_uid, former.st_gid)
        # After the owner: until then the group that may read it would be another.
        os.fchmod(descriptor, stat.S_IMODE(former.st_mode))
    except PermissionError as error:
        raise ConfigError(
            f"--file {path} belongs to user {former.st_uid} and group {former.st_gid}, and this user cannot keep that "
            f"ownership: add the key as that user, or as root"
        ) from error


def _hash() -> int:
    from tandem_services.gateway.access.keys import digest_of

    key = sys.stdin.readline().strip()
    if not key:
        raise StartupError("no key on stdin")
    print(digest_of(key))
    return 0


def _check(path: Path) -> int:
    from tandem_services.gateway.access.keys import KeyFileError, read_keys

    try:
        ring = read_keys(path)
    except KeyFileError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    print(json.dumps({tenant.name: len(tenant.sha256) for tenant in ring.tenants}))
    return 0
