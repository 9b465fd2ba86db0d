"""Run by an older release, with its packages: which messages of standard input it reads.

Input: a JSON object of names of structs and their bytes in hexadecimal. Output: one of names and problems; "" for a
message that was read, and nothing for a struct that the release does not have.
"""

import json
import pkgutil
import sys
from importlib import import_module

import msgspec


def structs() -> dict[str, type[msgspec.Struct]]:
    found: dict[str, type[msgspec.Struct]] = {}
    for package in map(import_module, ("tandem_engine.messages", "tandem_services.router")):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            values = vars(import_module(module.name)).items()
            found |= {n: v for n, v in values if isinstance(v, type) and issubclass(v, msgspec.Struct)}
    return found


def problem_with(data: bytes, struct: type[msgspec.Struct]) -> str:
    try:
        msgspec.msgpack.decode(data, type=struct)
    except msgspec.DecodeError as error:
        return str(error)
    return ""


def main() -> None:
    known, given = structs(), json.load(sys.stdin)
    json.dump({n: problem_with(bytes.fromhex(text), known[n]) for n, text in given.items() if n in known}, sys.stdout)


if __name__ == "__main__":
    main()
