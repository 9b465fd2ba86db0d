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
"""

import argparse
import http.client
import json
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

from chat_load import percentile_ms  # noqa: E402
from gateway_systems import Case, tandem  # noqa: E402

BODY_BYTES = (32 << 20) - 1024
"""Just below the longest body that a gateway takes."""
MOST_IDS = 2_000_000
JSON = {"Content-Type": "application/json"}


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
        "ids": (completions, filled(b'{"model":"mock","prompt":[', b"1", b",", b"]}", most=MOST_IDS)),
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


def measure(port: int, options: argparse.Namespace) -> dict[str, object]:
    shapes = bodies()
    phase = {"seconds": options.seconds / (len(shapes) + 1), "every_s": options.every_ms / 1000}
    idle = figures(live_seconds(port, **phase))
    found: dict[str, object] = {"idle": idle}
    for name, (path, body) in shapes.items():
        sender = Sender(port, path, body)
        sender.start()
        try:
            under = figures(live_seconds(port, **phase))
        finally:
            sender.stopping.set()
            sender.join()
        assert set(sender.statuses) == {400}, sender.statuses
        ratio = round(under["p99_ms"] / idle["p99_ms"], 2)
        found[name] = {**under, "p99_ratio": ratio, "bodies": len(sender.statuses), "body_bytes": len(body)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-ms", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        running = tandem(stack, Case(clients=1, requests=0, tokens=1, stream=False), options)
        found = measure(running.port, options)
    text = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
