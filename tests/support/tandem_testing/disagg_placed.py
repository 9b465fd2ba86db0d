"""NIXL transports in a process at an address of its own, controlled line by line.

    python -m tandem_testing.disagg_placed ADDRESS NAME...      says the `Hello` of each, in hex
    NAME greet HELLO                                            NAME learns a peer; no answer
    NAME push PEER                                              "done", or why it failed

Every transport listens for writes of peers between lines.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from tandem_engine.disaggregation.transport import PushDone, PushFailed
from tandem_engine.messages.transfer import Hello
from tandem_testing.chaos.namespaces import Namespace
from tandem_testing.disagg_nixl import Node, make_push, nixl_node

PORT = 7100
"""Of the endpoint in `Hello`; no process listens there."""


@dataclass(kw_only=True)
class Placed:
    """The process, and what its transports are."""

    process: "subprocess.Popen[str]"
    hellos: dict[str, str]
    """In hex, by name."""

    def greet(self, name: str, hello: str) -> None:
        self._say(f"{name} greet {hello}")

    def begin_push(self, name: str, peer: str) -> None:
        """A page to the incarnation `peer`. `outcome` tells how it went, once it has ended."""
        self._say(f"{name} push {peer}")

    def outcome(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def push(self, name: str, peer: str) -> str:
        self.begin_push(name, peer)
        return self.outcome()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@contextmanager
def placed(place: Namespace, names: Sequence[str]) -> Iterator[Placed]:
    """Transports of these worker ids in one process. Killed in the end."""
    argv = place.around([sys.executable, "-m", "tandem_testing.disagg_placed", place.address, *names])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Placed(process=process, hellos={name: process.stdout.readline().strip() for name in names})
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    address, *names = sys.argv[1:]
    with ExitStack() as stack:
        endpoint = f"tcp://{address}:{PORT}"
        nodes = {name: stack.enter_context(nixl_node(name, endpoint=endpoint)) for name in names}
        for node in nodes.values():
            node.transport.expect(1)
            _say(msgspec.msgpack.encode(node.transport.hello()).hex())
        for line in sys.stdin:
            name, order, what = line.split()
            if order == "greet":
                nodes[name].transport.connect(msgspec.msgpack.decode(bytes.fromhex(what), type=Hello))
            else:
                _say(_push(nodes[name], what))


def _push(node: Node, peer: str) -> str:
    node.events.clear()
    node.transport.push(make_push(peer, (1,), (1,)))
    (event,) = node.wait_for(PushDone | PushFailed)  # type: ignore[arg-type]
    return event.reason if isinstance(event, PushFailed) else "done"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
