"""numba's compiled functions in files of our own: written once, loaded by any later process.

A kernel is kept as its object code, with the symbols that it needs and defines (`kernels.cpu.machine_code`).

Code that a process compiles for its own CPU is kept for that CPU. Code of a level (`kernels.cpu.target`), which
builders compile, is preferred. The key has the digest of every file of this folder, as it was when this module was
imported, and of the file of the function: a change in any of them makes other code.
"""

import functools
import hashlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import llvmlite
import numba
import numpy as np
from numba import _dynfunc
from numba.core import compiler, registry, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.funcdesc import PythonFunctionDescriptor
from numba.core.typing import signature as signature_of

from tandem_engine.base.environment import kernel_environment
from tandem_engine.base.progress import START
from tandem_engine.kernels.cpu.machine_code import CannotKeepError, Loaded, can_load, described, type_of, written
from tandem_engine.kernels.cpu.target import target
from tandem_engine.kernels.store.code_file import Code
from tandem_engine.kernels.store.keys import KernelKey, KernelSpec
from tandem_engine.kernels.store.layers import KernelStore

logger = logging.getLogger(__name__)


def digest_of_folder(folder: Path) -> str:
    """Of the sources in `folder`."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


SOURCES = digest_of_folder(Path(__file__).parent)
"""Of this folder."""


@functools.cache
def store() -> KernelStore:
    """Of this process."""
    return KernelStore.of(kernel_environment())


def keys_of(spec: KernelSpec, file: str) -> tuple[KernelKey, ...]:
    """Where to look for code of a function in `file`, the best first. What is compiled here belongs to the last."""
    compiled_by = (
        sys.platform,
        sys.implementation.cache_tag,
        numba.__version__,
        llvmlite.__version__,
        SOURCES,
        _digest_of(file),
    )
    level, host = target(), registry.cpu_target.target_context.codegen().magic_tuple()
    compiles = {"NUMBA_CPU_NAME": host[1], "NUMBA_CPU_FEATURES": host[2]}
    names = [level.name] if level.cpu else []
    if compiles != level.numba_environment:
        names.append(f"{level.name}, wide {level.wide}, pairs {level.pairs}, for {' '.join(host)}")
    return tuple(KernelKey(spec=spec, target=name, compiler=compiled_by) for name in names)


@functools.cache
def _digest_of(file: str) -> str:
    path = Path(file)
    in_sources = path.parent == Path(__file__).parent
    return "" if in_sources else hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Callback:
    """A kernel that other compiled code may call."""

    address: int
    stored: bool
    """It was in a file."""
    code: object
    """What keeps it in memory; numba's `CFunc` where this process has compiled it."""


Build = Callable[..., Any]


class KeptBuilder:
    """A builder of callbacks that compiles what is in no file, once for the same arguments."""

    def __init__(self, build: Build) -> None:
        functools.update_wrapper(self, build)
        self._build, self._parameters = build, inspect.signature(build)
        self._made = functools.cache(self._make)
        _KEPT[_name_of(build)] = self

    def __call__(self, *given: Any, **named: Any) -> Callback:
        bound = self._parameters.bind(*given, **named)
        bound.apply_defaults()
        return self._made(**bound.arguments)

    def spec(self, *given: Any, **named: Any) -> KernelSpec:
        """Of a call."""
        bound = self._parameters.bind(*given, **named)
        bound.apply_defaults()
        plain = {name: value.name if isinstance(value, np.dtype) else value for name, value in bound.arguments.items()}
        assert all(isinstance(value, str | int) for value in plain.values()), f"{self._build.__name__} takes {plain}"
        return KernelSpec(function=_name_of(self._build), arguments=tuple(sorted(plain.items())))

    def keys(self, spec: KernelSpec) -> tuple[KernelKey, ...]:
        return keys_of(spec, self._build.__code__.co_filename)

    def make(self, spec: KernelSpec) -> None:
        """Ensure that the kernel of `spec` is in a file."""
        arguments = dict(spec.arguments or ())
        self(**{name: np.dtype(value) if isinstance(value, str) else value for name, value in arguments.items()})

    def _make(self, **arguments: Any) -> Callback:
        spec = self.spec(**arguments)
        keys = self.keys(spec)
        if (found := _find(keys)) is not None:
            return _callback(found)
        with _reported(), store().compiling(keys[-1]):
            if (found := _in_files(keys)) is not None:
                return _callback(found)
            with _timed(spec):
                kernel, compiled = self._build(**arguments)
            _save(keys[-1], compiled, entry=compiled.fndesc.llvm_cfunc_wrapper_name)
        return Callback(address=kernel.address, stored=False, code=kernel)


kept = KeptBuilder
_KEPT: "dict[str, KeptBuilder | KeptDispatcher]" = {}
"""All of this process, by their names in specs."""


def kept_by(spec: KernelSpec) -> "KeptBuilder | KeptDispatcher":
    """The builder or function of a spec."""
    import_module(spec.function.partition(":")[0])
    return _KEPT[spec.function]


class Expected(Protocol):
    """Kernels that other processes compile for this one."""

    def wait(self, keys: tuple[KernelKey, ...]) -> None:
        """Until one of the keys has a file, or no process compiles it."""
        ...

    def comes_later(self, keys: tuple[KernelKey, ...]) -> bool:
        """Whether this kernel need not be waited for, and a process compiles it."""
        ...


_expected: list[Expected] = []


@contextmanager
def expecting(kernels: Expected) -> Iterator[None]:
    """Before this process compiles a kernel, it waits for `kernels`."""
    _expected.append(kernels)
    try:
        yield
    finally:
        _expected.remove(kernels)


class LateKernel:
    """A kernel that this process can do without until another one has compiled it, where that is expected."""

    def __init__(self, builder: KeptBuilder, *given: Any, **named: Any) -> None:
        self._builder, self._build = builder, functools.partial(builder, *given, **named)
        self._spec = builder.spec(*given, **named)
        self._look_at = 0.0
        self._kernel = None if _comes_later(self._keys()) else self._build()

    def get(self) -> Callback | None:
        """The kernel, as soon as it is in a file. Cheap enough for every step."""
        if self._kernel is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            if not _comes_later(self._keys()) and is_there(self._spec):
                self._kernel = self._build()
                logger.info("from now on steps use %s", self._spec.name)
        return self._kernel

    def _keys(self) -> tuple[KernelKey, ...]:
        return self._builder.keys(self._spec)


LOOK_S = 0.25
"""Between two looks for a late kernel."""


def _comes_later(keys: tuple[KernelKey, ...]) -> bool:
    return any(kernels.comes_later(keys) for kernels in _expected)


def compiled_now(function: Build, signature: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """numba's callback of a function, and the result of its compiler."""
    kernel: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=dict(options))
    result = _Result()
    kernel._cache = result
    kernel.compile()
    return kernel, result.compiled


class _Result:
    """Takes the place of numba's cache and notes what it would keep."""

    compiled: Any = None

    def load_overload(self, signature: Any, context: Any) -> None:
        """Nothing is there."""

    def save_overload(self, signature: Any, compiled: Any) -> None:  # noqa: ARG002
        self.compiled = compiled


class KeptDispatcher(registry.CPUDispatcher):  # type: ignore[misc]
    """A function for Python code. Other compiled code must call a piece instead: this has no code to be linked."""

    def __init__(self, function: Build, options: Mapping[str, Any]) -> None:
        super().__init__(py_func=function, targetoptions={"nopython": True, **options})
        self._cache = _Files(function)
        _KEPT[_name_of(function)] = self

    def compile(self, sig: Any) -> Any:
        with global_compiler_lock, self._cache.compiling():
            return super().compile(sig)

    def spec(self, *types: Any) -> KernelSpec:
        """Of calls with arguments of these types, as `written`."""
        return KernelSpec(function=_name_of(self.py_func), types=types)

    def keys(self, spec: KernelSpec) -> tuple[KernelKey, ...]:
        return keys_of(spec, self.py_func.__code__.co_filename)

    def make(self, spec: KernelSpec) -> None:
        """Ensure that the code for the types of `spec` is in a file."""
        self.compile(tuple(type_of(text) for text in spec.types or ()))

    def inspect_llvm(self, signature: Any = None) -> Any:
        return self._compiled_again().inspect_llvm(signature)

    def inspect_asm(self, signature: Any = None) -> Any:
        return self._compiled_again().inspect_asm(signature)

    def _compiled_again(self) -> Any:
        """With the text that code from a file lacks."""
        again = registry.CPUDispatcher(py_func=self.py_func, targetoptions=self.targetoptions)
        for arguments in self.overloads:
            again.compile(arguments)
        return again

    def get_call_template(self, args: Any, kws: Any) -> Any:  # noqa: ARG002
        raise AssertionError(f"{self.__name__} is for Python; compiled code calls a piece")


class _Files:
    """Takes the place of numba's cache of one function."""

    cache_path = None

    def __init__(self, function: Build) -> None:
        self._function = function
        self._locks = ExitStack()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around `load_overload` and `save_overload`. What the first one locks is free at the end."""
        with ExitStack() as locks:
            self._locks = locks
            yield

    def load_overload(self, signature: Any, context: Any) -> Any:
        keys = self._keys(signature)
        if not keys:
            return None
        if (found := _find(keys)) is not None:
            return self._loaded(signature, found, context)
        self._locks.enter_context(_reported())
        self._locks.enter_context(store().compiling(keys[-1]))
        if (found := _in_files(keys)) is not None:
            return self._loaded(signature, found, context)
        self._locks.enter_context(_timed(keys[-1].spec))
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if keys := self._keys(signature):
            _save(keys[-1], compiled, entry=compiled.fndesc.llvm_cpython_wrapper_name)

    def _keys(self, signature: Any) -> tuple[KernelKey, ...]:
        arguments, _ = sigutils.normalize_signature(signature)
        try:
            spec = spec_of_function(self._function, arguments)
        except CannotKeepError as error:
            logger.warning("%s is compiled at every start: %s", self._function.__name__, error)
            return ()
        return keys_of(spec, self._function.__code__.co_filename)

    def _loaded(self, signature: Any, code: Code, context: Any) -> Any:
        """As numba would have it after compiling."""
        arguments, _ = sigutils.normalize_signature(signature)
        returns = type_of(code.header.returns)
        loaded = Loaded(code)
        environment = loaded.environments[code.header.environment]
        function, name = self._function, self._function.__qualname__
        described = PythonFunctionDescriptor(
            native=True,
            modname=function.__module__,
            qualname=name,
            unique_name=name,
            doc=function.__doc__,
            typemap=None,
            restype=returns,
            calltypes=None,
            args=tuple(inspect.signature(function).parameters),
            kws=(),
            mangler=lambda *_, **__: code.header.entry,
            argtypes=tuple(arguments),
            env_name=code.header.environment,
        )
        entry = _dynfunc.make_function(
            sys.modules[function.__module__],
            function.__name__,
            function.__doc__ or "",
            loaded.address(code.header.entry),
            environment,
            (loaded,),
        )
        return compiler.compile_result(
            typing_context=context.typing_context,
            target_context=context,
            entry_point=entry,
            type_annotation="",
            signature=signature_of(returns, *arguments),
            objectmode=False,
            lifted=(),
            fndesc=described,
            library=None,
            environment=environment,
            reload_init=(),
            referenced_envs=(),
        )

    def flush(self) -> None:
        """Nothing waits to be written."""


def spec_of_function(function: Build, arguments: Any) -> KernelSpec:
    """Raises `CannotKeepError` for a function whose code depends on more than its file and its types."""
    if function.__closure__:
        raise CannotKeepError("it closes over values")
    if not Path(function.__code__.co_filename).is_file():
        raise CannotKeepError("it has no file")
    return KernelSpec(function=_name_of(function), types=tuple(written(kind) for kind in arguments))


def _name_of(function: Build) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def is_there(spec: KernelSpec) -> bool:
    """Whether a process need not compile the kernel of `spec`."""
    return any(store().has(key) for key in kept_by(spec).keys(spec))


def _find(keys: tuple[KernelKey, ...]) -> Code | None:
    found = _in_files(keys)
    for kernels in _expected if found is None else ():
        kernels.wait(keys)
        found = found or _in_files(keys)
    return found


def _in_files(keys: tuple[KernelKey, ...]) -> Code | None:
    for key in keys:
        found = store().find(key)
        if found is not None and can_load(found):
            return found
    return None


@contextmanager
def _reported() -> Iterator[None]:
    """Around what compiles a kernel, or waits for a process that does."""
    START.kernel_missing()
    yield
    START.kernel_compiled()


def _callback(code: Code) -> Callback:
    loaded = Loaded(code)
    return Callback(address=loaded.address(code.header.entry), stored=True, code=loaded)


def _save(key: KernelKey, compiled: Any, *, entry: str) -> None:
    try:
        code = described(key, compiled, entry)
    except CannotKeepError as error:
        logger.warning("%s is compiled at every start: %s", key.spec.name, error)
        return
    store().save(key, code)


@contextmanager
def _timed(spec: KernelSpec) -> Iterator[None]:
    began = time.perf_counter()
    yield
    logger.info("compiled %s in %.1f s", spec.name, time.perf_counter() - began)
