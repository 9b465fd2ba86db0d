"""Random requests to a whole gateway in one process: served, or refused by name [request-never-kills].

    python -m tandem_testing.request_fuzz [--requests 100000] [--seed 1] [--first 0] [--generating]

The application, its parts and the wire to an engine are the product's; there is no HTTP connection, and the engine is a
mock. Request number N of a seed is always the same, so `--first N --requests 1` asks it again. What must hold of each:

    200        and JSON, or events to the end
    4xx        in the API's shape of an error, with the field at fault by name and nothing of the gateway's inside
    504        only for a request that allows itself no time; nothing else of 5xx

And at the end: every field of every endpoint was sent, memory has not grown, and sound requests are served by the
engine that was there at the start.
"""

import argparse
import asyncio
import itertools
import json
import re
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.health import Health
from tandem_services.gateway.app import create_app
from tandem_testing.gateway_builders import EngineRack, FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.random_bodies import GENERATING, SHAPES, RandomBodies, fields_of
from tandem_testing.tokenizer_builders import EOS, TOOL_CHATML, write_tokenizer

AT_ONCE = 8
CONTEXT = 96
GROWTH_MIB = 64
"""That a hundred thousand requests may add, once a fifth of them is over."""
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
INSIDES = re.compile(r"Traceback|0x[0-9a-f]{6}|site-packages|\.py(:\d|\", line)|\b\d{1,3}(\.\d{1,3}){3}\b")

JSON = {"Content-Type": "application/json"}


@dataclass(kw_only=True)
class FuzzedGateway:
    """One that is asked without a connection."""

    http: httpx.AsyncClient
    chooser: FakeChooser
    rack: EngineRack

    async def ask(self, path: str, body: Any) -> httpx.Response:
        return await self.http.post(path, content=json.dumps(body).encode())

    def forget(self) -> None:
        """What the doubles keep for other tests."""
        self.chooser.queries.clear()
        for engine in self.rack.engines:
            engine.received.clear()


@asynccontextmanager
async def fuzzed_gateway(folder: Path) -> AsyncIterator[FuzzedGateway]:
    """With one engine, whose sequences are short. `folder`: for a tokenizer."""
    tokenizer = TextTokenizer.load(write_tokenizer(folder, chat_template=TOOL_CHATML))
    with EngineRack() as rack:
        engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS, tokens_per_output=8))
        engine.context_length = CONTEXT
        config = config_of(request_timeout_s=30.0, ping_interval_s=5.0)
        chooser = FakeChooser([engine.view])
        fleet = fleet_of(config, chooser, SessionShelf(), rack.context, tokenizer)
        app = create_app(config, [fleet], health=Health(), clock=MonotonicClock())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=JSON, timeout=60.0) as http,
        ):
            yield FuzzedGateway(http=http, chooser=chooser, rack=rack)


@dataclass(frozen=True, slots=True)
class RandomRequest:
    path: str
    body: dict[str, Any]

    @staticmethod
    def number(number: int, seed: int, paths: tuple[str, ...] = tuple(SHAPES)) -> "RandomRequest":
        random = Random(f"{seed} {number}")
        path = random.choice(paths)
        return RandomRequest(path, RandomBodies(path, random).body())


def problem_of(asked: RandomRequest, answer: httpx.Response) -> str:
    """What is wrong with an answer; nothing if nothing is."""
    in_no_time = asked.body.get("timeout") is not None
    if answer.status_code == 200:
        return _event_problem(answer, in_no_time) if "event-stream" in answer.headers["content-type"] else ""
    if answer.status_code >= 500 and not (answer.status_code == 504 and in_no_time):
        return "5xx"
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return "no error object"
    anthropic = asked.path.startswith("/v1/messages")
    if set(error) != ({"type", "message"} if anthropic else {"message", "type", "param", "code"}):
        return "another shape of error"
    if CONTROLS.search(error["message"]) or INSIDES.search(error["message"]):
        return "a message that tells too much"
    if not anthropic and not error["param"] and answer.status_code != 504:
        return "no field is named"
    return ""


def _event_problem(answer: httpx.Response, in_no_time: bool) -> str:
    documents = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    try:
        reported = [json.loads(document) for document in documents if document != "[DONE]"]
    except ValueError:
        return "an event that is no JSON"
    if not reported:
        return "a stream without events"
    failed = any(event.get("error") or event.get("type") in {"error", "response.failed"} for event in reported)
    return "a stream that failed" if failed and not in_no_time else ""


@dataclass(kw_only=True)
class Tally:
    """What came of a run."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sent: dict[str, set[str]] = field(default_factory=dict)
    grown_mib: float = 0.0

    def note(self, number: int, asked: RandomRequest, answer: httpx.Response) -> None:
        self.statuses[asked.path, answer.status_code] += 1
        self.sent.setdefault(asked.path, set()).update(asked.body)
        wrong = problem_of(asked, answer)
        if wrong:
            reported = f"{answer.status_code} {answer.text[:400]}"
            self.problems.append(f"{number}: {wrong}: {asked.path} {json.dumps(asked.body)[:1000]}\n    {reported}")

    def unsent(self) -> list[str]:
        """Fields that no request had."""
        return sorted(f"{path} {name}" for path, sent in self.sent.items() for name in fields_of(path) - sent)


async def fuzz(gateway: FuzzedGateway, numbers: range, seed: int, paths: tuple[str, ...] = tuple(SHAPES)) -> Tally:
    """Ask the requests of these numbers, `AT_ONCE` at once, and then the sound ones."""
    tally, left = Tally(), iter(numbers)
    settled = _settled(len(numbers))

    async def requester() -> None:
        for number in left:
            asked = RandomRequest.number(number, seed, paths)
            tally.note(number, asked, await gateway.ask(asked.path, asked.body))
            tally.grown_mib = next(settled)
            gateway.forget()

    await asyncio.gather(*(requester() for _ in range(AT_ONCE)))
    for path, (_, sound) in SHAPES.items():
        answer = await gateway.ask(path, sound)
        if answer.status_code != 200:
            tally.problems.append(f"afterwards {path} answers {answer.status_code} {answer.text[:400]}")
    return tally


def _settled(count: int) -> Iterator[float]:
    """MiB that this process has become larger since a fifth of `count` was over."""
    begin = 0.0
    for number in itertools.count():
        if number <= count // 5:
            begin = resident_mib()
            yield 0.0
        else:
            yield max(0.0, resident_mib() - begin)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


async def main(arguments: argparse.Namespace) -> int:
    numbers = range(arguments.first, arguments.first + arguments.requests)
    paths = GENERATING if arguments.generating else tuple(SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        async with fuzzed_gateway(Path(folder)) as gateway:
            tally = await fuzz(gateway, numbers, arguments.seed, paths)
    for line in tally.problems[:50]:
        sys.stdout.write(line + "\n")
    statuses = {f"{path} {status}": count for (path, status), count in sorted(tally.statuses.items())}
    unsent = tally.unsent() if arguments.requests >= 10_000 else []
    reported = {
        "requests": sum(statuses.values()),
        "seed": arguments.seed,
        "problems": len(tally.problems),
        "unsaid_fields": unsent,
        "grown_mib": round(tally.grown_mib, 1),
        "statuses": statuses,
    }
    sys.stdout.write(json.dumps(reported, indent=1) + "\n")
    return 1 if tally.problems or unsent or tally.grown_mib > GROWTH_MIB else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--generating", action="store_true", help="only the endpoints that generate")
    sys.exit(asyncio.run(main(parser.parse_args())))
