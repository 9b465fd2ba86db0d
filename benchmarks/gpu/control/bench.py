"""What a part works with: the device, the clock, the ceilings of this process, and where results go."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from gpu.ceilings import Ceilings, measure
from gpu.control import lines, machine
from gpu.control.record import Record
from gpu.stopwatch import Stopwatch


@dataclass(kw_only=True)
class Bench:
    """Of one process of one part."""

    record: Record
    device: torch.device
    tiny: bool
    """Sizes that a CPU can do, to try the programs; figures mean nothing."""
    folder: Path
    """Of the run: for the few files besides its lines."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    @cached_property
    def watch(self) -> Stopwatch:
        return Stopwatch(self.device)

    @cached_property
    def ceilings(self) -> Ceilings:
        """Measured at the first use, and once more when the part has ended."""
        return self._measured("before")

    def close(self) -> None:
        """The ceilings once more: if they have changed, figures between them mean less."""
        if "ceilings" in self.__dict__:
            self._measured("after")

    def _measured(self, when: str) -> Ceilings:
        found = measure(self.watch, self.dtype, tiny=self.tiny)
        self.record.write(
            lines.Ceilings(
                part=self.record.part,
                when=when,
                copy_gb_s=found.copy_bytes_per_s / 1e9,
                matmul_tflops=found.matmul_flops / 1e12,
                clocks=machine.clocks(self.device),
            )
        )
        return found
