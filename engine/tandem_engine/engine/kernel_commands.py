"""`tandem kernels`: compiled kernels of a CPU engine before it starts, for images and shared folders."""

import os
import sys
import time

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import EngineConfig
from tandem_engine.engine.kernel_plan import kernel_plan
from tandem_engine.engine.loaded_model import require_loadable
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.kernels.store.keys import KernelSpec
from tandem_engine.kernels.store.layers import own_folder, prune


def build(config: EngineConfig) -> int:
    """Compile what an engine of `config` calls and no file has. Returns the exit status."""
    from tandem_engine.kernels.cpu.builders import Builders
    from tandem_engine.kernels.cpu.kept import store

    plan = _plan(config)
    own = store().own
    if own is None:
        raise ConfigError("there is no folder for kernels: set TANDEM_CACHE_DIR")
    builders = Builders(plan, meter_for("cpu").available())
    try:
        started = builders.start()
        missing = builders.wait_for_all() if started else ()
    finally:
        builders.close()
    if missing:
        print(f"not compiled: {', '.join(spec.name for spec in missing)}", file=sys.stderr)
        return 1
    print(f"{len(plan)} kernels for {_target()} are in {own}")
    return 0


def show(config: EngineConfig, *, missing_only: bool) -> int:
    """A line for each kernel that an engine of `config` calls; status 1 if any is missing."""
    from tandem_engine.kernels.cpu.kept import is_there

    states = [(spec, is_there(spec)) for spec in _plan(config)]
    for spec, present in states:
        if not (present and missing_only):
            print(f"{'present' if present else 'missing'}  {spec.name}")
    return 0 if all(present for _, present in states) else 1


def delete_unused() -> int:
    """Kernels that were not used for 30 days, and those beyond 512 MiB."""
    folder = own_folder(os.environ)
    deleted = [] if folder is None else prune(folder, time.time())
    for name in deleted:
        print(f"deleted  {name}")
    return 0


def _plan(config: EngineConfig) -> tuple[KernelSpec, ...]:
    plan = kernel_plan(config, require_loadable(config)).all
    if not plan:
        raise ConfigError(f"--device {config.device}: only an engine on a CPU has kernels that are compiled in advance")
    return plan


def _target() -> str:
    from tandem_engine.kernels.cpu.target import target

    return target().name
