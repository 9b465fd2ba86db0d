"""Between numba's compiled functions and the files of kernels: what is written of them, and how it is loaded.

Each kernel is loaded into an execution engine of its own: numba numbers the names of functions in each process, so code
of two processes may use one name for different functions.
"""

import ctypes
import hashlib
import logging
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types
from numba.core import registry
from numba.core.environment import Environment, lookup_environment
from numba.core.runtime import rtsys

from tandem_engine.kernels.store import code_file
from tandem_engine.kernels.store.code_file import Code, Header
from tandem_engine.kernels.store.keys import KernelKey

# numba's types as text and tuples, for the keys of compiled code and for its files.
#
# int64                          "int64"
# a dense array of float32       ("array", "float32", 2, "C")
# a tuple of both                ("tuple", ("array", "float32", 2, "C"), "int64")
# nothing                        None

_SCALARS = {
    str(kind): kind
    for kind in (types.boolean, types.int32, types.int64, types.uint32, types.uint64, types.float32, types.float64)
}
_NUMBERS = _SCALARS | {str(kind): kind for kind in (types.int8, types.int16, types.uint8, types.uint16)}


class CannotKeepError(Exception):
    """Code uses something that a file of a kernel has no place for."""


def written(kind: Any) -> Any:
    """A type as text and tuples. Raises `CannotKeepError` for kinds that kernels have no use for."""
    if kind == types.none:
        return None
    if str(kind) in _NUMBERS and _NUMBERS[str(kind)] == kind:
        return str(kind)
    if isinstance(kind, types.Array) and type(kind) is types.Array and kind.aligned:
        access = () if kind.mutable else ("readonly",)
        return ("array", written(kind.dtype), kind.ndim, kind.layout, *access)
    if isinstance(kind, types.BaseTuple) and not isinstance(kind, types.BaseNamedTuple):
        return ("tuple", *(written(each) for each in kind))
    raise CannotKeepError(f"it takes or returns {kind}")


def array(number: str, dimensions: int) -> tuple[str, str, int, str]:
    """A dense array, as `written`."""
    return "array", number, dimensions, "C"


def type_of(text: Any) -> Any:
    """The inverse of `written`."""
    if text is None:
        return types.none
    if isinstance(text, str):
        return _NUMBERS[text]
    kind, *rest = text
    if kind == "tuple":
        return types.BaseTuple.from_types(tuple(type_of(each) for each in rest))
    assert kind == "array", f"{kind} is no type"
    number, dimensions, layout, *access = rest
    return types.Array(type_of(number), dimensions, layout, readonly=bool(access))


logger = logging.getLogger(__name__)
_llvm: Any = llvmlite.binding
_ENVIRONMENT = "_ZN08NumbaEnv"


def can_load(code: Code) -> bool:
    """LLVM ends the process when a symbol is missing."""
    rtsys.initialize(registry.cpu_target.target_context)  # defines the symbols of numba's runtime
    missing = [name for name in code.header.imports if _llvm.address_of_symbol(name) is None]
    if missing:
        logger.warning("a compiled kernel is not used: this process has no %s", ", ".join(missing))
    return not missing


class Loaded:
    """Object code in the memory of this process."""

    def __init__(self, code: Code) -> None:
        machine = _llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = _llvm.create_mcjit_compiler(_llvm.parse_assembly(""), machine)
        self._engine.add_object_file(_llvm.ObjectFileRef.from_data(code.object))
        self._engine.finalize_object()
        self.environments = {each.name: self._environment(each) for each in code.header.environments}

    def address(self, symbol: str) -> int:
        """Of a function."""
        address = int(self._engine.get_function_address(symbol))
        assert address, f"{symbol} is missing in its own object"
        return address

    def _environment(self, described: code_file.Environment) -> Any:
        made = Environment({"__name__": __name__})
        made.env_name = described.name
        made.consts.extend(None if name is None else np.dtype(name) for name in described.dtypes)
        place = self._engine.get_global_value_address(described.name)
        assert place, f"{described.name} is missing in its own object"
        ctypes.c_void_p.from_address(place).value = id(made)
        return made


def described(key: KernelKey, compiled: Any, entry: str) -> Code:
    """Raises `CannotKeepError` for code that needs more of a process than symbols and dtypes."""
    if compiled.reload_init:
        raise CannotKeepError("it needs a library to be set up")
    module, described = compiled.library._final_module, compiled.fndesc
    declared = [each.name for each in (*module.functions, *module.global_variables) if each.is_declaration]
    imports = sorted({name for name in declared if not name.startswith("llvm.")})
    if missing := [name for name in imports if _llvm.address_of_symbol(name) is None]:
        raise CannotKeepError(f"it calls {', '.join(missing)}, which other compiled code defines")
    names = {each.name for each in module.global_variables if each.name.startswith(_ENVIRONMENT)}
    found = {name: lookup_environment(name) for name in names} | {described.env_name: compiled.environment}
    code = compiled.library._get_compiled_object()
    return Code(
        header=Header(
            key=key.text,
            sha256=hashlib.sha256(code).hexdigest(),
            entry=entry,
            environment=described.env_name,
            environments=tuple(_written(name, each) for name, each in sorted(found.items()) if each is not None),
            imports=tuple(imports),
            returns=written(compiled.signature.return_type),
        ),
        object=code,
    )


def _written(name: str, environment: Any) -> code_file.Environment:
    constants = list(environment.consts)
    if not all(each is None or (isinstance(each, np.dtype) and each.isnative) for each in constants):
        raise CannotKeepError(f"it reads {constants}")
    return code_file.Environment(name=name, dtypes=tuple(None if each is None else each.name for each in constants))
