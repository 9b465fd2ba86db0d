"""The file of one kernel: a line of JSON, then machine code. To read it executes nothing.

    TANDEM-KERNEL {"key": …, "entry": …, "sha256": …, …}
    an object file

numba's own cache consists of pickles, and to read a pickle is to execute it. The machine code does run when the kernel
is called, so `kernels.store.layers` reads files of this user and of root alone.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

_MAGIC = b"TANDEM-KERNEL "
SUFFIX = ".kernel"


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Python objects that compiled code reads."""

    name: str
    """The symbol that has its address."""
    dtypes: tuple[str | None, ...] = ()
    """Its constants: numpy's names of dtypes, or None."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a kernel's code."""

    key: str
    """All that the code depends on, as text: see `kernels.store.keys`."""
    sha256: str
    """Of the object."""
    entry: str
    """Symbol of the function to call."""
    environment: str
    """Name of the one of the function itself."""
    environments: tuple[Environment, ...]
    imports: tuple[str, ...]
    """Symbols that the process must have."""
    returns: Any = None
    """Type of the result, as `kernels.cpu.kept` writes types; None for a callback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """A kernel as it lies in a file."""

    header: Header
    object: bytes


class DamagedError(Exception):
    """The bytes are no file of a kernel, or not the whole one."""


def encode(code: Code) -> bytes:
    return _MAGIC + msgspec.json.encode(code.header) + b"\n" + code.object


def decode(data: bytes, *, key: str) -> Code:
    """The kernel of `key`. Raises `DamagedError` for anything else."""
    line, _, code = data.partition(b"\n")
    if not line.startswith(_MAGIC):
        raise DamagedError("it does not begin as the file of a kernel")
    try:
        header = msgspec.json.decode(line[len(_MAGIC) :], type=Header)
    except msgspec.MsgspecError as error:
        raise DamagedError(str(error)) from error
    if header.key != key:
        raise DamagedError("it has another key")
    if header.sha256 != hashlib.sha256(code).hexdigest():
        raise DamagedError("its code is not the one that was written")
    return Code(header=header, object=code)
