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
from numba.core import registry
from numba.core.environment import Environment, lookup_environment
from numba.core.runtime import rtsys

from tandem_engine.kernels.cpu.type_text import CannotKeepError, written
from tandem_engine.kernels.store import code_file
from tandem_engine.kernels.store.code_file import Code, Header
from tandem_engine.kernels.store.keys import KernelKey

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
