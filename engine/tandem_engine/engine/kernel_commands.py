"""`tandem kernels`: compiled kernels of a CPU engine before it starts, for images and shared folders."""

import time

from tandem_engine.base.environment import kernel_environment
from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.config import EngineConfig
from tandem_engine.engine.kernel_plan import kernel_plan
from tandem_engine.engine.loaded_model import require_loadable
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.kernels.store.keys import KernelSpec
from tandem_engine.kernels.store.layers import own_folder, prune


def build(config: EngineConfig, *, reproducible: bool = False) -> str:
    """Compile what an engine of `config` calls and no file has; returns what is there then.

    `reproducible`: in one process, so that symbols are the same each time. Raises `EngineError` when a kernel cannot be
    compiled, or kept.
    """
    from tandem_engine.kernels.cpu.builders import Builders
    from tandem_engine.kernels.cpu.target import target

    plan, folder = _plan(config), own_folder(kernel_environment())
    builders = Builders(plan, meter_for("cpu").available(), reproducible=reproducible)
    try:
        if builders.start():
            builders.wait_for_all()
    finally:
        builders.close()
    if missing := builders.missing():
        raise EngineError(f"not in {folder or 'a file'}: {', '.join(spec.name for spec in missing)}")
    return f"{len(plan)} kernels for {target().name} are there; new ones go to {folder}"


def listed(config: EngineConfig) -> list[tuple[str, bool]]:
    """Each kernel that an engine of `config` calls, and whether a file has it."""
    from tandem_engine.kernels.cpu.kept import is_there

    return [(spec.name, is_there(spec)) for spec in _plan(config)]


def delete_unused() -> list[str]:
    """Files of kernels that were not used for 30 days, and those beyond 512 MiB, which are gone now."""
    folder = own_folder(kernel_environment())
    return [] if folder is None else prune(folder, time.time())


def _plan(config: EngineConfig) -> tuple[KernelSpec, ...]:
    plan = kernel_plan(config, require_loadable(config)).all
    if not plan:
        raise ConfigError(f"--device {config.device}: only kernels of a CPU are compiled in advance")
    return plan
