"""What the gateway costs per request and per streamed token, with a mock engine that costs nothing.

    python benchmarks/gateway_mock.py [--requests 2000] [--streams 64] [--tokens 256] [--step-ms 5] [--out r.json]

Gateway, engine and load run in processes of their own. Figures are per core of the gateway: work divided by
the CPU time that its process used, so that a busy machine does not blur them. Cases:

    whole     chat, not streamed, one output token: cost of a request
    streamed  chat, streamed, one token per step: cost of a token
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "tests/support")]

import uvloop  # noqa: E402

from tandem_engine.config import Role  # noqa: E402
from tandem_engine.ipc.channels import IpcContext  # noqa: E402
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer  # noqa: E402
from tandem_services.common.health import Health  # noqa: E402
from tandem_services.gateway.app import create_app  # noqa: E402
from tandem_services.gateway.serve import http_server, listen  # noqa: E402
from tandem_services.router.choice import WorkerView  # noqa: E402
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of  # noqa: E402
from tandem_testing.mock_engine import MockBehaviour, MockEngine, scripted_tokens  # noqa: E402
from tandem_testing.tokenizer_builders import write_tokenizer  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One case."""

    requests: int
    tokens: int
    seconds: float
    cpu_seconds: float
    """Of the gateway's process."""
    ttft_p50_ms: float

    @property
    def figures(self) -> dict[str, float]:
        return {
            "requests_per_core_s": round(self.requests / self.cpu_seconds),
            "tokens_per_core_s": round(self.tokens / self.cpu_seconds),
            "cores_used": round(self.cpu_seconds / self.seconds, 2),
        }


def run_engine(step_s: float) -> None:
    behaviour = MockBehaviour(token=scripted_tokens([70 + i % 20 for i in range(100_000)]), step_s=step_s)
    engine = MockEngine(context=IpcContext(), worker_id="mock", behaviour=behaviour, context_length=100_000).start()
    print(json.dumps(asdict(engine.view)), flush=True)
    sys.stdin.read()
    os._exit(0)


def run_gateway(view: str) -> None:
    worker = json.loads(view)
    worker["role"] = Role(worker["role"])
    tokenizer = TextTokenizer.load(write_tokenizer(Path(tempfile.mkdtemp())))
    config = config_of()

    async def serve() -> None:
        health = Health()
        fleet = fleet_of(config, FakeChooser([WorkerView(**worker)]), SessionShelf(), IpcContext(), tokenizer)
        app = create_app(config, [fleet], health=health)
        with listen("127.0.0.1", 0) as listener:
            print(listener.getsockname()[1], flush=True)
            await http_server(app, config, health).serve(sockets=[listener])

    uvloop.run(serve())


def start(*argv: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, __file__, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def ask(port: int, body: bytes, count: int, first_bytes: list[float]) -> None:
    """`count` requests, one after the other, on one connection; reads every answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n"
    for _ in range(count):
        began = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        first_bytes.append(time.perf_counter() - began)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        if b"content-length" in answer:
            length = int(answer.partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


async def measure(port: int, pid: int, *, clients: int, each: int, tokens: int, stream: bool) -> Measured:
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": "hello world, tell me about the quick brown fox"}],
        "max_tokens": tokens,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    await asyncio.gather(*(ask(port, data, 1, []) for _ in range(clients)))
    firsts: list[float] = []
    cpu, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(ask(port, data, each, firsts) for _ in range(clients)))
    return Measured(
        requests=clients * each,
        tokens=clients * each * tokens,
        seconds=time.perf_counter() - began,
        cpu_seconds=cpu_seconds(pid) - cpu,
        ttft_p50_ms=round(sorted(firsts)[len(firsts) // 2] * 1000, 2),
    )


def run_load(options: argparse.Namespace) -> dict[str, object]:
    results: dict[str, object] = {"machine": platform.machine(), "cores": os.cpu_count()}
    for case in ("whole", "streamed"):
        step = options.step_ms / 1000 if case == "streamed" else 0.0
        engine = start("--engine", str(step))
        gateway = start("--gateway", engine.stdout.readline().strip())
        try:
            port = int(gateway.stdout.readline())
            stream = case == "streamed"
            each = max(1, options.requests // 16) if not stream else 2
            clients = options.streams if stream else 16
            tokens = options.tokens if stream else 1
            measured = uvloop.run(measure(port, gateway.pid, clients=clients, each=each, tokens=tokens, stream=stream))
            results[case] = {**asdict(measured), **measured.figures}
        finally:
            for process in (gateway, engine):
                process.kill()
                process.communicate()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        run_engine(options.engine)
    elif options.gateway is not None:
        run_gateway(options.gateway)
    else:
        results = json.dumps(run_load(options), indent=2)
        print(results)
        if options.out is not None:
            options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
