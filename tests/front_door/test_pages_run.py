"""The commands of a page, as a new user types them: blocks after `<!-- run -->`, in order, in an empty home.

A block after `<!-- run: in the background, until it prints "TEXT" -->` stays in the background until the page ends it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_services.common.sockets import free_port
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.system import START_TIMEOUT_S
from tandem_testing.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("first-answer.md",)
DEFAULT_PORT = "8000"
BLOCK = re.compile(r'<!-- run(?:: in the background, until it prints "([^"]+)")? -->\n```bash\n(.*?)```\n', re.DOTALL)
MARK = "<!-- run"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Commands of a page."""

    text: str
    awaited: str
    """Printed by one in the background; "" for one that ends."""


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = BLOCK.findall(text)
    assert len(found) == text.count(MARK), f"docs/{page}: a mark without a block of bash"
    for awaited, commands in found:
        yield Block(text=commands, awaited=awaited)


class Shell:
    """Of a user with an empty home in a clone, whose `tandem` serves on a free port instead of the usual one."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, str(free_port())
        (home / "models").symlink_to(ROOT / "models")
        program = home / "bin" / "tandem"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tandem_services.cli.main "$@"\n')
        program.chmod(0o755)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "XDG_", "TANDEM_"))}
        # Kernels are those of other tests: what compiles them is tested elsewhere.
        cached = {name: os.environ[name] for name in ("TANDEM_CACHE_DIR", "XDG_CACHE_HOME") if name in os.environ}
        if not cached:
            cached = {"XDG_CACHE_HOME": str(Path.home() / ".cache")}
        path = f"{program.parent}:{os.environ['PATH']}"
        self.environment = kept | cached | {"HOME": str(home), "PATH": path, "TANDEM_PORT": self.port}

    def run(self, commands: str) -> str:
        """What they print; each has to succeed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._here(commands)],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, block: Block) -> "subprocess.Popen[bytes]":
        """Returns when it has printed what the page awaits."""
        log = self.home / "output"
        with log.open("wb") as output:
            command = ["bash", "-euc", f"exec {self._here(block.text)}"]
            process = subprocess.Popen(command, env=self.environment, cwd=self.home, stdout=output, stderr=output)

        def printed() -> bool:
            assert process.poll() is None, log.read_text()
            return block.awaited in log.read_text()

        wait_for(printed, START_TIMEOUT_S, log.read_text)
        return process

    def _here(self, commands: str) -> str:
        return commands.replace(f":{DEFAULT_PORT}", f":{self.port}").replace(
            "tandem chat", f"tandem chat --url http://127.0.0.1:{self.port}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run_in_an_empty_home(page, tmp_path):
    shell, running = Shell(tmp_path), []
    try:
        for block in blocks_of(page):
            if block.awaited:
                running.append(shell.start(block))
            else:
                printed = shell.run(block.text)
                # curl succeeds with the body of an error, too.
                assert printed, block.text
                assert '"error"' not in printed, printed
        assert [process.wait(START_TIMEOUT_S) for process in running] == [0] * len(running)
    finally:
        for process in running:
            process.kill()
            process.wait()
