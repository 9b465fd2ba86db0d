"""Uses a running system as its clients and its operators do."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem_engine.ipc.keys import KeyPair
from tandem_lab.bench.load import Measurement, Prompt, RequestSpec, StreamCheck, Target, at_concurrency
from tandem_services.common.tokens import order_token
from tandem_testing.metric_text import metric_sum
from tandem_testing.system import System
from tandem_testing.waiting import until

READ_TIMEOUT_S = 120.0
"""A stream that is silent for longer has hung."""
SETTLE_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 150.0
"""`tandem up` waits for up to half a minute before it starts again what has ended several times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of a workload are drawn."""

    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True


GREEDY = Sampling()


class ChunkCounter(httpx.AsyncBaseTransport):
    """Counts the streams that have begun to speak, so that a test can act in the middle of them."""

    def __init__(self) -> None:
        self.speaking = 0
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_CountedStream(self, response.stream),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


@dataclass(slots=True)
class _CountedStream(httpx.AsyncByteStream):
    counter: ChunkCounter
    inner: httpx.AsyncByteStream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        first = True
        async for chunk in self.inner:
            self.counter.speaking += first
            first = False
            yield chunk

    async def aclose(self) -> None:
        await self.inner.aclose()


@dataclass(kw_only=True, slots=True)
class SystemClient:
    """One HTTP client with what tests ask of a system. Use as `async with`."""

    system: System
    chunks: ChunkCounter = field(default_factory=ChunkCounter)
    http: httpx.AsyncClient = field(init=False)
    model: str = ""

    async def __aenter__(self) -> "SystemClient":
        self.http = httpx.AsyncClient(
            base_url=self.system.url,
            transport=self.chunks,
            timeout=httpx.Timeout(READ_TIMEOUT_S, pool=None),
            event_hooks={"request": [self._authorize]},
        )
        self.model = (await self.get("/v1/models"))["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def _authorize(self, request: httpx.Request) -> None:
        """Orders to workers bring the system's token."""
        if not str(request.url).startswith(self.system.url):
            token = order_token(KeyPair.load(self.system.run_dir / "keys.json"))
            request.headers.setdefault("Authorization", f"Bearer {token}")

    async def get(self, path: str) -> Any:
        """A JSON document of the gateway, or of a worker when `path` is a URL."""
        response = await self.http.get(path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    async def metric(self, name: str, url: str = "") -> float:
        """Sum of a metric's series, of the gateway or of the worker at `url`."""
        try:
            answer = await self.http.get(f"{url}/metrics")
        except httpx.RemoteProtocolError:  # a connection that its server closed while it was idle
            answer = await self.http.get(f"{url}/metrics")
        return metric_sum(answer.text, name)

    async def streams(self, specs: Sequence[RequestSpec], sampling: Sampling = GREEDY) -> list[Measurement]:
        """Stream all of `specs` at the same time, results in their order."""
        target = Target(
            client=self.http,
            model=self.model,
            temperature=sampling.temperature,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        )
        result = await at_concurrency(target, specs, len(specs), lambda _: None)
        by_spec = {measurement.spec: measurement for measurement in result.measurements}
        return [by_spec[spec] for spec in specs]

    async def chat(self, messages: list[dict[str, str]], *, max_tokens: int = 24) -> "ChatAnswer":
        """Stream one greedy chat completion. Raises `AssertionError` when the stream is not sound."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        check, text = StreamCheck(), ""
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                chunk = check.take(line.removeprefix("data: ")) if line.startswith("data: ") else None
                for choice in chunk["choices"] if chunk else ():
                    text += choice["delta"].get("content") or ""
        fault = check.verdict(max_tokens)
        assert fault is None, fault
        return ChatAnswer(id=check.ids.pop(), text=text, usage=check.usage)

    async def complete(self, prompt: Prompt, *, max_tokens: int = 4) -> dict[str, Any]:
        """One greedy completion without streaming."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def attempts(self, response_id: str) -> list[dict[str, Any]]:
        """All attempts at the first choice of a request, oldest first."""
        record = await self.get(f"/v1/requests/{response_id}/explain")
        attempts: list[dict[str, Any]] = record["choices"][0]["attempts"]
        return attempts

    async def tokens(self, text: str) -> tuple[int, ...]:
        response = await self.http.post("/tokenize", json={"model": self.model, "prompt": text})
        return tuple(response.json()["tokens"])

    @contextlib.asynccontextmanager
    async def open_stream(self, prompt: Prompt, *, max_tokens: int) -> AsyncIterator[httpx.Response]:
        """A streamed completion that the test reads, or leaves."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            yield response

    async def audit(self, worker_id: str) -> dict[str, Any]:
        """What the engine of this worker counts."""
        report: dict[str, Any] = await self.get(f"{self.system.workers[worker_id]}/audit")
        return report

    async def settled(self) -> None:
        """Wait until every engine is idle and holds nothing; then its pages must add up."""
        for worker_id, url in self.system.workers.items():
            report: dict[str, Any] = {}

            async def idle(url: str = url, report: dict[str, Any] = report) -> bool:
                try:
                    response = await self.http.get(f"{url}/audit")
                except httpx.TransportError:  # being restarted
                    return False
                if response.status_code == 504:  # its engine still loads
                    return False
                report.update(response.json())
                return report["idle"] and report["private_pages"] == report["held_pages"] == 0

            await until(idle, SETTLE_TIMEOUT_S, f"{worker_id} idle", report.copy)
            assert report["problems"] == [], f"{worker_id}: {report['problems']}"
            dummy = 1
            total = await self.metric("tandem_worker_kv_pages", url)
            assert report["free_pages"] + report["tree_pages"] + dummy == total, f"{worker_id}: {report}"

    async def all_ready(self, *, instead_of: Sequence[int] = ()) -> None:
        """Wait until `tandem up` has brought back everything, and the gateway sees it so; none of the pids `instead_of`
        counts."""

        async def ready() -> bool:
            present = {process.pid for process in self.system.processes()}
            if present & set(instead_of):
                return False
            # Redis, the gateway, and two processes per worker.
            if len(present) < 2 + 2 * len(self.system.workers):
                return False
            for url in ("", *self.system.workers.values()):
                if not await self.is_ready(url):
                    return False
            return True

        await until(ready, READY_TIMEOUT_S, "every worker ready")
        await self._in_view(frozenset(process.pid for process in self.system.processes()))

    async def _in_view(self, pids: frozenset[int]) -> None:
        """Wait until the gateway's last view has these workers and no others; it decides by that when Redis is late."""
        began, seen = time.monotonic(), dict[str, Any]()

        async def in_view() -> bool:
            seen.update(await self.get("/console/data/fleet"))
            since = pids == self.system.viewed or time.monotonic() - began > seen["view_age_s"]
            states = {worker["incarnation"]: worker["state"] for worker in seen["workers"]}
            names = sorted(incarnation.partition("@")[0] for incarnation in states)
            return since and names == sorted(self.system.workers) and set(states.values()) == {"ready"}

        await until(in_view, READY_TIMEOUT_S, "every worker in the gateway's view", seen.copy)
        self.system.viewed = pids

    async def is_ready(self, url: str) -> bool:
        try:
            return (await self.http.get(f"{url}/ready")).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """A finished chat completion."""

    id: str
    text: str
    usage: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


@dataclass(kw_only=True, slots=True)
class Reference:
    """Another system whose texts are the right ones; it is asked once for each."""

    system: System
    _texts: dict[tuple[RequestSpec, Sampling], str] = field(default_factory=dict)

    async def texts(self, specs: Sequence[RequestSpec], sampling: Sampling = GREEDY) -> list[str]:
        missing = [spec for spec in specs if (spec, sampling) not in self._texts]
        if missing:
            async with SystemClient(system=self.system) as client:
                for answer in await client.streams(missing, sampling):
                    assert answer.ok, answer.error
                    self._texts[answer.spec, sampling] = answer.text
        return [self._texts[spec, sampling] for spec in specs]
