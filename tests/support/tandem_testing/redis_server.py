"""A real redis-server process for one test or module.

server = RedisServer.start()
…                       # server.url; kill(), pause(), resume(), restart(), wipe()
server.stop()           # by pid, also when it was paused
"""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.addresses import Address
from tandem_services.common.sockets import free_port

REDIS_SERVER = shutil.which("redis-server")
"""None where Redis is not installed; tests that need it skip."""
UP_S = 60.0
TRIES = 5


@dataclass(kw_only=True)
class RedisServer:
    """One process on a loopback port, with nothing on disk but what `extra` asks for."""

    port: int
    host: str = "127.0.0.1"
    extra: tuple[str, ...] = ()
    before_exec: Callable[[], None] | None = None
    """Called in the new process, e.g. `die_with_parent`."""
    process: "subprocess.Popen[bytes] | None" = None
    sentinel: Path | None = None
    """The configuration of a Sentinel, which it rewrites; None: a server."""

    @classmethod
    def start(
        cls,
        *extra: str,
        host: str = "127.0.0.1",
        before_exec: Callable[[], None] | None = None,
        sentinel: Path | None = None,
    ) -> "RedisServer":
        for _ in range(TRIES):
            server = cls(port=free_port(host), host=host, extra=extra, before_exec=before_exec, sentinel=sentinel)
            if server._comes_up():
                return server
        raise AssertionError(f"redis-server ended {TRIES} times when it was started")

    @property
    def url(self) -> str:
        return Address(self.host, self.port).url("/0", scheme="redis")

    def restart(self) -> None:
        """Start again on the same port, empty."""
        assert self._comes_up(), "redis-server ended when it was started"

    def _comes_up(self) -> bool:
        """False if it ends instead: another process has taken the port since it was found free."""
        assert REDIS_SERVER is not None, "redis-server is not installed"
        place = ("--port", str(self.port), "--bind", self.host, "--dir", "/tmp")
        kind = ("--save", "", "--appendonly", "no") if self.sentinel is None else ("--sentinel",)
        config = () if self.sentinel is None else (str(self.sentinel),)
        self.process = subprocess.Popen(
            [REDIS_SERVER, *config, *place, *kind, *self.extra],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=self.before_exec,  # noqa: PLW1509  only prctl runs between fork and exec
        )
        return self._is_up()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Hang: connections stay open and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Lose all data and functions, as a restart without persistence does."""
        self.command("FLUSHALL")
        self.command("FUNCTION", "FLUSH")

    def command(self, *args: str) -> str:
        """Send one command over a connection of its own and return the raw first chunk of the reply."""
        request = f"*{len(args)}\r\n" + "".join(f"${len(a.encode())}\r\n{a}\r\n" for a in args)
        with socket.create_connection((self.host, self.port), timeout=UP_S) as connection:
            connection.sendall(request.encode())
            return connection.recv(65536).decode("utf-8", "replace")

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.kill()
        self.process.wait()

    def _is_up(self) -> bool:
        assert self.process is not None
        deadline, ours = time.monotonic() + UP_S, f"process_id:{self.process.pid}\r\n"
        while True:
            try:
                if ours in self.command("INFO", "server"):
                    return True
            except OSError:
                pass
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"redis-server did not answer within {UP_S:g} s"
            time.sleep(0.01)
