"""What `/live` waits for while a client sends request bodies of 32 MB to a gateway. A real gateway before mock workers.

    python benchmarks/body_stall.py [--seconds 20] [--every-ms 20] [--out r.json]

One connection asks for `/live` each `--every-ms`, first while nothing else comes, then in a phase of equal length for
each shape of body, in which another connection sends one body after the other:

    text      a chat whose one message is a long text
    escapes   the same, each character of it an escape
    messages  a chat of a million short messages
    ids       a completion whose prompt are two million token ids

The gateway refuses all of them after it has read them. The figures are milliseconds from request to answer, and the
ratio of each phase's 99th percentile to that of the idle phase. Sender and gateway share the machine: with few cores
some of the ratio is the sender's.

In the phase `unfinished`, 60 connections at once announce a body of 31 MiB and send all of it but one byte. The
result adds how the gateway answered them (`open`: it waits for the last byte), the most bytes that its budget held, and
by how much the peak of its memory exceeds what it had before. The exit status is 1 if bodies held exceed the
budget of one client.
"""

import argparse
import http.client
import json
import re
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

from chat_load import percentile_ms  # noqa: E402
from gateway_systems import Case, Running, tandem  # noqa: E402

BODY_BYTES = (32 << 20) - 1024
"""Just below the longest body that a gateway takes."""
MAX_IDS = 2_000_000
JSON = {"Content-Type": "application/json"}
PHASES = 6
"""Idle, unfinished bodies, and one for each shape."""
UNFINISHED = 60
UNFINISHED_BYTES = 31 << 20
CLIENT_BUDGET = 64 << 20
"""Of one client, here an address: the default of `--max-body-memory-per-client`."""


def filled(head: bytes, item: bytes, separator: bytes, tail: bytes, *, most: int = BODY_BYTES) -> bytes:
    """As many items as fit into a body, `most` at most."""
    count = min(most, (BODY_BYTES - len(head) - len(tail)) // (len(item) + len(separator)))
    return head + separator.join([item] * count) + tail


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body by the shape's name."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    text = b'{"model":"mock","messages":[{"role":"user","content":"'
    return {
        "text": (chat, filled(text, b"a" * 1024, b"", b'"}]}')),
        "escapes": (chat, filled(text, b"\\n", b"", b'"}]}')),
        "messages": (
            chat,
            filled(b'{"model":"mock","messages":[', b'{"role":"user","content":"hi"}', b",", b"]}"),
        ),
        "ids": (completions, filled(b'{"model":"mock","prompt":[', b"1", b",", b"]}", most=MAX_IDS)),
    }


class Sender(threading.Thread):
    """Sends one body until it is stopped. Sockets release the interpreter while they send."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        super().__init__()
        self._port, self._path, self._body = port, path, body
        self.stopping = threading.Event()
        self.statuses: list[int] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request("POST", self._path, self._body, JSON)
            answer = connection.getresponse()
            answer.read()
            self.statuses.append(answer.status)
            connection.close()


class Unfinished(threading.Thread):
    """One connection that sends all of its body but the last byte, and then waits for an answer or the end."""

    def __init__(self, port: int, body: bytes) -> None:
        super().__init__()
        self._body = body
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.outcome = "open"

    def run(self) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {UNFINISHED_BYTES}\r\n"
        # One that is refused by its head is closed before it has sent its body. The answer may be there all the same.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
            self._connection.sendall(self._body)
        try:
            answer = self._connection.recv(1024)
        except ConnectionResetError:
            answer = b""
        self.outcome = answer.split()[1].decode() if answer else "closed"

    def stop(self) -> None:
        with suppress(OSError):  # the gateway has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self.join()
        self._connection.close()


def bytes_held(port: int) -> int:
    """By bodies, as the gateway counts them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(r"^tandem_gateway_request_body_bytes (\S+)$", text, re.MULTILINE)
    assert found is not None, "a gateway without a budget"
    return int(float(found[1]))


def memory_mib(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1]) / 1024


def live_seconds(port: int, *, seconds: float, every_s: float) -> list[float]:
    """Of each request for `/live`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.request("GET", "/live")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        taken.append(time.perf_counter() - began)
        time.sleep(max(0.0, every_s - taken[-1]))
    connection.close()
    return taken


def figures(seconds: list[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile_ms(seconds, 0.50),
        "p99_ms": percentile_ms(seconds, 0.99),
        "max_ms": round(max(seconds) * 1000, 2),
    }


def phase(options: argparse.Namespace, *, parts: int = 1) -> dict[str, float]:
    """One of so many parts of a phase."""
    return {"seconds": options.seconds / PHASES / parts, "every_s": options.every_ms / 1000}


def measure(running: Running, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    port = running.port
    idle = figures(live_seconds(port, **phase(options)))
    found: dict[str, dict[str, object]] = {"idle": {**idle}, "unfinished": measure_unfinished(running, options)}
    for name, (path, body) in bodies().items():
        sender = Sender(port, path, body)
        sender.start()
        try:
            under = figures(live_seconds(port, **phase(options)))
        finally:
            sender.stopping.set()
            sender.join()
        assert set(sender.statuses) == {400}, sender.statuses
        found[name] = {**under, "bodies": len(sender.statuses), "body_bytes": len(body)}
    for each in found.values():
        each["p99_ratio"] = round(float(str(each["p99_ms"])) / idle["p99_ms"], 2)
    return found


def measure_unfinished(running: Running, options: argparse.Namespace) -> dict[str, object]:
    """Before any other body, so that no memory of theirs is there to be used again."""
    gateway = running.pids[0]
    Path(f"/proc/{gateway}/clear_refs").write_text("5")  # the peak is from now on
    before = memory_mib(gateway, "VmRSS")
    body = bytes(UNFINISHED_BYTES - 1)
    connections = [Unfinished(running.port, body) for _ in range(UNFINISHED)]
    for each in connections:
        each.start()
    held: list[int] = []
    taken: list[float] = []
    for _ in range(4):
        taken += live_seconds(running.port, **phase(options, parts=4))
        held.append(bytes_held(running.port))
    outcomes = Counter(each.outcome for each in connections)
    for each in connections:
        each.stop()
    return {
        **figures(taken),
        "bodies": UNFINISHED,
        "body_bytes": UNFINISHED_BYTES,
        "outcomes": dict(outcomes),
        "most_held_bytes": max(held),
        "budget_bytes": CLIENT_BUDGET,
        "memory_grown_mib": round(memory_mib(gateway, "VmHWM") - before, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-ms", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        running = tandem(stack, Case(clients=1, requests=0, tokens=1, stream=False), options)
        found = measure(running, options)
    text = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    return int(int(str(found["unfinished"]["most_held_bytes"])) > CLIENT_BUDGET)


if __name__ == "__main__":
    raise SystemExit(main())
