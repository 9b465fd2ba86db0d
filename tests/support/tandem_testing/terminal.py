"""Programs on a terminal of a given size (a pty), and what they write there."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PATIENCE_S = 120.0


@dataclass(kw_only=True)
class OnTerminal:
    """A program whose standard streams are one terminal."""

    pid: int
    descriptor: int
    output: str = ""
    """All that it has written."""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, *, after: str = "") -> None:
        """Until `text` is in the output, after the last `after`."""
        while after not in self.output or text not in self.output[self.output.rindex(after) if after else 0 :]:
            assert self._read(), f"it ended without {text!r}: {self.output!r}"

    def end(self) -> int:
        """Reads until it has ended; returns the exit status."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], PATIENCE_S)
        assert ready, f"nothing more for {PATIENCE_S} s: {self.output!r}"
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # EIO: nothing has the terminal open
            return False
        self.output += data.decode(errors="replace")
        return bool(data)


@contextmanager
def on_terminal(
    argv: Sequence[str], *, columns: int = 80, rows: int = 24, env: Mapping[str, str] | None = None
) -> Iterator[OnTerminal]:
    """Runs `argv` in the block; what still runs at its end is killed. `env` replaces variables of this process."""
    pid, descriptor = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.execvpe(argv[0], [*argv], {**os.environ, **(env or {})})
    program = OnTerminal(pid=pid, descriptor=descriptor)
    try:
        yield program
    finally:
        if program.pid:
            os.kill(program.pid, signal.SIGKILL)
            os.waitpid(program.pid, 0)
        os.close(descriptor)
