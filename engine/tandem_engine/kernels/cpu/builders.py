"""The kernels of a plan, compiled by other processes while this one reads weights.

A process that is about to need kernels starts builders (`kernels.cpu.build`) for those that are in no file, and waits
for each only where it needs it (`kernels.cpu.kept.expecting`). Another process may have started builders for the same
kernels: then it waits for these. Builders end with the process that started them; what they have finished stays.
"""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tandem_engine.base.environment import environment_with
from tandem_engine.base.logs import configured_format
from tandem_engine.base.progress import START, Phase
from tandem_engine.kernels.cpu.build import LATE, builders_at_work, places
from tandem_engine.kernels.cpu.kept import expecting, is_there, store
from tandem_engine.kernels.cpu.target import VARIABLE, target
from tandem_engine.kernels.store.keys import KernelKey, KernelSpec

logger = logging.getLogger(__name__)
POLL_S = 0.05
MAX_STARTS = 3
"""Of all builders: where they are killed again and again, this process compiles for itself."""


class Builders:
    """Compile `plan`, then `late`, in this order. `close` them."""

    def __init__(
        self, plan: Sequence[KernelSpec], memory: int, *, late: Sequence[KernelSpec] = (), reproducible: bool = False
    ) -> None:
        """`memory`: bytes that are free for them. `late`: need not be waited for, and is built at a low priority.
        `reproducible`: one process compiles all: numba's symbols have the number of functions that their process has
        compiled before.
        """
        self.plan, self._late = tuple(plan), tuple(late)
        self._places = 1 if reproducible else places(memory)
        self._environment = {"PYTHONHASHSEED": "0"} if reproducible else {}
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts = 0
        self._failed = self._has_warned = False

    def missing(self) -> tuple[KernelSpec, ...]:
        """Those of the plan that are in no file."""
        return _missing(self.plan)

    def start(self) -> bool:
        """Start processes for what is missing. Returns whether anything is."""
        missing, late = self.missing(), _missing(self._late)
        if not (missing or late) or not store().keeps():
            return False
        self._starts += 1
        level = target()
        # -P: the current folder is no place for modules.
        command = [sys.executable, "-P", "-m", "tandem_engine.kernels.cpu.build"]
        command += [str(self._places), configured_format().value]
        for _ in range(min(self._places, len(missing) + len(late))):
            process = subprocess.Popen(
                [*command, *(spec.text for spec in missing), LATE, *(spec.text for spec in late)],
                env=environment_with({**level.numba_environment, VARIABLE: level.name, **self._environment}),
                stdin=subprocess.DEVNULL,
            )
            self._processes.append(process)
            # This process may serve for days: what has ended is not to stay a zombie.
            threading.Thread(target=process.wait, name="builder", daemon=True).start()
        return True

    def wait(self, keys: tuple[KernelKey, ...]) -> None:
        """See `kept.Expected`."""
        specs = {key.spec for key in keys}
        if specs.isdisjoint(self.plan):
            return
        while not any(store().has(key) for key in keys) and self._continues():
            self.report()
            time.sleep(POLL_S)

    def comes_later(self, keys: tuple[KernelKey, ...]) -> bool:
        """See `kept.Expected`."""
        if {key.spec for key in keys}.isdisjoint(self._late):
            return False
        return not any(store().has(key) for key in keys) and self._continues()

    def wait_for_all(self) -> tuple[KernelSpec, ...]:
        """Until no builder is at work; returns what is still missing."""
        while missing := self.missing():
            if not self._continues():
                return missing
            self.report()
            time.sleep(POLL_S)
        return ()

    def report(self) -> None:
        """The progress of the start of this process."""
        START.report(Phase.KERNELS, done=len(self.plan) - len(self.missing()), total=len(self.plan))

    def close(self) -> None:
        """End the processes; kernels that they have finished stay."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _continues(self) -> bool:
        """Whether builders are at work, here or elsewhere; starts them where none is."""
        with self._lock:
            return self._are_at_work() or self._start_again()

    def _are_at_work(self) -> bool:
        for process in [each for each in self._processes if each.poll() is not None]:
            self._processes.remove(process)
            self._failed = self._failed or process.returncode > 0
        return bool(self._processes) or builders_at_work(store())

    def _start_again(self) -> bool:
        if not self._failed and self._starts < MAX_STARTS:
            return self.start()
        if not self._has_warned:
            self._has_warned = True
            logger.warning("builders of kernels have ended early: this process compiles what it cannot do without")
        return False


def _missing(specs: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    return tuple(spec for spec in specs if not is_there(spec))


@contextmanager
def built_elsewhere(plan: Sequence[KernelSpec], memory: int, *, late: Sequence[KernelSpec] = ()) -> Iterator[None]:
    """While there is an engine that calls the kernels of `plan`, and those that are `late` once they are there."""
    builders = Builders(plan, memory, late=late)
    if not builders.start():
        yield
        return
    try:
        with expecting(builders):
            yield
    finally:
        builders.close()
