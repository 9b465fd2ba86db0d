"""A gateway as clients meet it: uvicorn on a free port, mock engines behind it, a chooser without Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import msgspec

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.health import Health
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.sockets import listen
from tandem_services.gateway.app import Gateway, api_app, build_gateway
from tandem_services.gateway.config import GatewayConfig, ModelConfig
from tandem_services.gateway.console.fleet_document import ViewedFleet
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.models.service import Fleet
from tandem_services.gateway.serve import console_of, http_server
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import (
    Latency,
    MemberProofs,
    NoWorkersError,
    PlannedFetch,
    PricedOption,
    PricedOptions,
    PricedPrefix,
    Reservation,
    RouteDecision,
    RouteQuery,
    ScoreTerm,
    Source,
    WorkerView,
)
from tandem_services.router.membership import FleetView
from tandem_services.router.registry import WorkerState
from tandem_services.router.scoring import DECODE_ROOM, placement_of
from tandem_services.router.shared_state import SessionBinding, SessionName
from tandem_services.router.starting import StartingWorker
from tandem_testing.mock_engine import MockBehavior, MockEngine
from tandem_testing.router_builders import make_choice

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanExport

FULL = ScoreTerm(DECODE_ROOM, NO_ROOM_S)
PATIENCE_S = 60.0
"""Of clients; tests that set the loop's time forward count on it."""


def priced_options_of(prefill: str | None, decode: str, *, others: int, more: int) -> PricedOptions:
    """A choice of these workers from `others` that would compute alone, and `more` that are not listed."""
    terms = (ScoreTerm("decode_load", 0.5), ScoreTerm("prefill_compute", 1.0))
    chosen = PricedOption(
        decode=decode,
        prefill=prefill,
        predicted_s=0.5,
        terms=terms[:1],
        matched_tokens=0,
        decode_matched_tokens=0,
        fetch=None,
    )
    reported = [
        PricedOption(
            decode=f"other-{number}@1",
            prefill=None,
            predicted_s=1.5,
            terms=terms,
            matched_tokens=64,
            matched_host_tokens=48,
            decode_matched_tokens=64,
            fetch=PricedPrefix("p@1", 128, 0.25),
        )
        for number in range(others)
    ]
    return PricedOptions(options=(chosen, *reported), more=more)


@dataclass
class FakeChooser:
    """Takes the first worker of each role that is neither excluded nor dead."""

    fleet: list[WorkerView]
    queries: list[RouteQuery] = field(default_factory=list)
    open: int = 0
    """Choices not released yet."""
    room: float = float("inf")
    """Sequences that all workers together have room for; later ones would have to wait for them."""
    dead: set[str] = field(default_factory=set)
    revived: list[str] = field(default_factory=list)
    """Workers marked dead that have answered since."""
    refusals: list[tuple[str, WorkerState]] = field(default_factory=list)
    """Workers that have sent a request away, and why."""
    fetch: PlannedFetch | None = None
    """Part of every choice."""
    priced: PricedOptions | None = None
    """The same."""
    latency: Latency | None = None
    """The same."""
    tickets: dict[str, WorkerView] = field(default_factory=dict)
    """Workers that a stand-alone router has chosen, by the ticket's id."""
    starts: list[StartingWorker] = field(default_factory=list)
    """Workers that report their start."""
    death: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first worker was marked dead."""

    async def choose(self, query: RouteQuery) -> RouteDecision:
        self.queries.append(query)
        decode = self._first(query, Role.DECODE, Role.BOTH)
        if decode is None:
            raise NoWorkersError("no worker", retry_after=2.0)
        full = self.open >= self.room
        self.open += 1
        prefill = self._first(query, Role.PREFILL)
        return RouteDecision(
            request_id=query.request_id,
            decode=decode,
            prefill=prefill,
            source=Source.LOCAL,
            placement=placement_of(decode.role, paired=prefill is not None, degraded=True),
            terms=(ScoreTerm("queue", 0.001), ScoreTerm("prefill", 0.002), *([FULL] if full else [])),
            matched_tokens=4,
            fetch=self.fetch,
            priced=self.priced,
            latency=self.latency,
            reservation=Reservation(None, ()),
        )

    async def redeem(self, ticket_id: str, query: RouteQuery) -> RouteDecision | None:
        worker = self.tickets.pop(ticket_id, None)
        return None if worker is None else replace(await self.stay(query, worker.incarnation), source=Source.ROUTER)

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> RouteDecision:
        choice = await self.choose(replace(query, exclude=query.exclude | {leaving.incarnation}))
        return replace(choice, prefill=leaving)

    async def stay(self, query: RouteQuery, incarnation: str) -> RouteDecision:
        self.queries.append(query)
        worker = next((worker for worker in self.workers() if worker.incarnation == incarnation), None)
        if worker is None:
            raise NoWorkersError("gone", retry_after=2.0)
        self.open += 1
        return make_choice(query.request_id, worker, source=Source.SESSION)

    async def release(self, choice: RouteDecision) -> None:
        self.open -= 1

    def release_soon(self, choice: RouteDecision) -> None:
        self.open -= 1

    def prefill_rate(self, model: str) -> float:
        return 1000.0 * len(self.workers())

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(worker for worker in self.fleet if worker.incarnation not in self.dead)

    def peers(self, worker: WorkerView) -> tuple[WorkerView, ...]:
        del worker
        return self.workers()

    def offered(self) -> tuple[WorkerView, ...]:
        return self.workers()

    def starting(self) -> tuple[StartingWorker, ...]:
        return tuple(self.starts)

    def rely_on(self, proofs: MemberProofs) -> None:
        del proofs  # it answers for its fleet itself

    def mark_dead(self, incarnation: str) -> None:
        self.dead.add(incarnation)
        self.death.set()

    def mark_alive(self, incarnation: str) -> None:
        self.dead.discard(incarnation)
        self.revived.append(incarnation)

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        self.refusals.append((incarnation, state))

    def _first(self, query: RouteQuery, *roles: Role) -> WorkerView | None:
        fit = (w for w in self.workers() if w.role in roles and w.incarnation not in query.exclude)
        return next((w for w in fit if query.only is None or w.incarnation in query.only), None)


@dataclass
class SessionShelf:
    """Bindings of sessions in memory, which nothing forgets by itself."""

    bindings: dict[SessionName, SessionBinding] = field(default_factory=dict)
    reachable: bool = True

    async def find(self, name: SessionName) -> SessionBinding | None:
        self._require()
        return self.bindings.get(name)

    async def open(self, name: SessionName, *, ttl_s: float) -> bool:
        self._require()
        return self.bindings.setdefault(name, binding := SessionBinding()) is binding

    async def put(self, name: SessionName, binding: SessionBinding, *, ttl_s: float) -> None:
        self._require()
        self.bindings[name] = binding

    async def update(self, name: SessionName, binding: SessionBinding, *, ttl_s: float) -> None:
        self._require()
        if name in self.bindings:
            self.bindings[name] = binding

    async def forget(self, name: SessionName) -> SessionBinding | None:
        self._require()
        return self.bindings.pop(name, None)

    def _require(self) -> None:
        if not self.reachable:
            raise RedisUnavailableError("no answer")


@dataclass
class EngineRack:
    """Mock engines that share a context and end together."""

    context: IpcContext = field(default_factory=IpcContext)
    engines: list[MockEngine] = field(default_factory=list)
    handed_over: set[str] = field(default_factory=set)

    def add(self, worker_id: str, behavior: MockBehavior, role: Role = Role.BOTH) -> MockEngine:
        engine = MockEngine(
            context=self.context,
            worker_id=worker_id,
            behavior=behavior,
            role=role,
            handed_over=self.handed_over,
        ).start()
        self.engines.append(engine)
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.stop()
        self.context.close()


@dataclass(kw_only=True)
class LiveGateway:
    """A gateway that listens, and what is behind it."""

    url: str
    http: httpx.AsyncClient
    chooser: FakeChooser
    sessions: SessionShelf
    tokenizer: TextTokenizer
    health: Health
    order_token: str
    """What commands need where there are no keys."""

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "mock", "messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "mock", "prompt": prompt, **fields})


def config_of(**config: Any) -> GatewayConfig:
    """Of a gateway with one model, "mock" by default. `config`: fields of `GatewayConfig` and `ModelConfig`.

    A thread that gets no processor for seconds is not taken for a dead worker.
    """
    of_model = {field.name for field in fields(ModelConfig)}
    model = {"path": Path(), "names": ("mock",), **{name: config[name] for name in config.keys() & of_model}}
    rest = {name: config[name] for name in config.keys() - of_model}
    return GatewayConfig(models=(ModelConfig(**model),), **{"ping_interval_s": 5.0, **rest})


def fleet_of(
    config: GatewayConfig,
    chooser: Any,
    sessions: Any,
    context: IpcContext,
    tokenizer: TextTokenizer,
    **boards: Any,
) -> Fleet:
    """That of the one model of `config`."""
    [model] = config.models
    return Fleet(config=model, chooser=chooser, sessions=sessions, context=context, tokenizer=tokenizer, **boards)


@asynccontextmanager
async def live_gateway(
    context: IpcContext,
    tokenizer: TextTokenizer,
    engines: list[MockEngine],
    *,
    usage: Any = None,
    fairness: Any = None,
    end_reports: Any = None,
    spans: "SpanExport | None" = None,
    seen: Callable[[], FleetView] | None = None,
    clock: Clock | None = None,
    **config: Any,
) -> AsyncIterator[LiveGateway]:
    """Serve until the block ends; with the console if there is a fleet to be `seen`.

    `config`: fields of `GatewayConfig`, and of the `ModelConfig` of its one model.
    """
    settings = config_of(**{"recovery_s": 0.5, **config})
    chooser = FakeChooser([engine.view for engine in engines])
    sessions = SessionShelf()
    fleet = fleet_of(settings, chooser, sessions, context, tokenizer, fairness=fairness, end_reports=end_reports)
    health = Health()
    clock = clock or MonotonicClock()
    gateway = build_gateway(settings, [fleet], clock=clock, health=health, usage=usage, spans=spans)
    console = None if seen is None else console_of(gateway, lambda: [ViewedFleet("default", seen)])
    async with serving_gateway(gateway, settings, console=console) as http:
        yield LiveGateway(
            url=str(http.base_url),
            http=http,
            chooser=chooser,
            sessions=sessions,
            tokenizer=tokenizer,
            health=health,
            order_token=gateway.order_access.token,
        )


@asynccontextmanager
async def serving_fleets(settings: GatewayConfig, fleets: Sequence[Fleet]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that serves `fleets` until the block ends."""
    gateway = build_gateway(settings, fleets, clock=MonotonicClock(), health=Health())
    async with serving_gateway(gateway, settings) as http:
        yield http


@asynccontextmanager
async def serving_gateway(
    gateway: Gateway, settings: GatewayConfig, *, console: Console | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """The same of a gateway that is built already."""
    app = api_app(gateway, metrics=settings.admin_port is None, console=console)
    server = http_server(app, settings, gateway.health)
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            # Of bodies that a test writes itself.
            headers = {"Content-Type": "application/json"}
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers, timeout=PATIENCE_S) as http:
                # The socket listens already: the first answer comes once the application has started.
                await http.get("/live")
                yield http
        finally:
            server.should_exit = True
            await serving


def script(tokenizer: TextTokenizer, text: str, *, eos: int) -> list[int]:
    """Token ids of an output that reads `text` and then ends."""
    return [*tokenizer.encode(text, add_special_tokens=False), eos]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """JSON documents of a streamed response, whose last line must be `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines
    return [msgspec.json.decode(line) for line in lines[:-1]]
