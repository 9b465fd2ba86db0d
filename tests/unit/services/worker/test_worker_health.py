import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tandem_engine.base.names import LinkTransport
from tandem_engine.base.release import RELEASE
from tandem_engine.config import Role
from tandem_engine.messages.control import (
    AbortRequests,
    AdapterMemory,
    AuditReport,
    DecodeElsewhere,
    EngineReady,
    FailedAdapter,
    FlushCache,
    LoadAdapter,
    OperatorOrder,
    OrderDone,
    OrderRefused,
    PauseGeneration,
    PauseMode,
    ReloadWeights,
    ResumeGeneration,
    ServedAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)
from tandem_engine.messages.stats import EngineStats, LinkReport, PrefixFetchStats, SpeculationStats, StepFit
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.tokens import OrderAccess
from tandem_services.worker.engine_process import OrderRefusedError
from tandem_services.worker.http_api import AdapterReport, HealthServer, WorkerProbes, build_app
from tandem_services.worker.metrics import LAST_OF_FORMER_NAMES, ServiceNumbers, WorkerCollector
from tandem_services.worker.rates import DecodeStep, MeasurementError, Progress, Prompt, Rates
from tandem_testing.mock_engine_process import idle_stats, ready_message

TOKEN = "t" * 64
JSON = {"content-type": "application/json"}
FORMER_NAMES = [
    ("poison_requests", "requests_convicted"),
    ("corrupted_requests", "requests_unsound"),
    ("kv_transfer_unexpected_errors", "kv_transfer_mishaps"),
    ("prefix_fetch_requested", "prefix_fetch_asked"),
    ("prefix_fetch_served", "prefix_fetch_lent"),
    ("prefix_fetch_served_pages", "prefix_fetch_lent_pages"),
]
ORDER = {"authorization": f"Bearer {TOKEN}", **JSON}


class Probed:
    """What the endpoints of one test see."""

    def __init__(self) -> None:
        self.health = Health()
        self.stalled_s = 0.0
        self.stats: EngineStats | None = idle_stats(running=3, evictable_pages=1, output_tokens_total=12)
        self.drained = 0
        self.draining_s: float | None = None
        self.ready: EngineReady | None = ready_message("w0@1")
        self.roles: list[Role] = []
        self.standby: str | None = "until a canary has passed"
        self.report: AuditReport | None = None
        self.orders: list[OperatorOrder] = []
        self.held = 0
        self.forced: list[bool] = []
        self.rates: Rates | None = None
        self.outcome: OrderDone | Exception = OrderDone(nonce=7, message="done", figures={"pages": 3})

    async def audit(self) -> AuditReport:
        if self.report is None:
            raise TimeoutError
        return self.report

    async def measure_rates(self, force: bool) -> AsyncGenerator[Progress | Rates, None]:
        self.forced.append(force)
        if not force:
            raise OrderRefusedError(OrderRefused(nonce=0, code="busy", message="3 requests run here"))
        yield Progress(0, 2, "prompt of 64 tokens")
        if self.rates is None:
            raise MeasurementError("the engine was silent")
        yield self.rates

    async def operate(self, order: Callable[[int], OperatorOrder], *, timeout_s: float) -> OrderDone:
        self.orders.append(order(7))
        if isinstance(self.outcome, OrderDone):
            return self.outcome
        raise self.outcome

    async def set_role(self, role: Role, *, timeout_s: float) -> OrderDone:
        self.roles.append(role)
        return await self.operate(lambda nonce: DecodeElsewhere(nonce=nonce, wanted=True), timeout_s=timeout_s)

    def drain(self) -> None:
        self.drained += 1

    def offer(self) -> str | None:
        self.standby = None
        return None if self.ready is not None else "the engine loads the model"

    def hold(self) -> None:
        self.held += 1

    def numbers(self) -> ServiceNumbers:
        return ServiceNumbers(
            registered=True,
            offered=False,
            index_replays=2,
            redis_failures=5,
            role=Role.PREFILL,
            draining_s=self.draining_s,
            stats_age_s=0.25,
            ready=self.ready,
        )

    def probes(self) -> WorkerProbes:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(lambda: self.stats, self.numbers))
        return WorkerProbes(
            health=self.health,
            registry=registry,
            stalled_s=lambda: self.stalled_s,
            links=lambda: (),
            adapters=lambda: AdapterReport.of(self.ready),
            audit=self.audit,
            drain=self.drain,
            operate=self.operate,
            set_role=self.set_role,
            offer=self.offer,
            hold=self.hold,
            measure_rates=self.measure_rates,
            order_access=OrderAccess(token=TOKEN, hosts=AllowedHosts()),
            model="mini",
        )


@pytest.fixture
def probed():
    return Probed()


@pytest.fixture
async def client(probed):
    transport = httpx.ASGITransport(app=build_app(probed.probes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker", headers=ORDER) as client:
        yield client


async def test_live_depends_on_the_engines_loop_alone(probed, client):
    probed.health.add_check("registry", lambda: "not registered")
    probed.stalled_s = 29.0
    assert (await client.get("/live")).status_code == 200
    probed.stalled_s = 31.0
    assert (await client.get("/live")).status_code == 503


async def test_ready_gives_its_reasons(probed, client):
    assert (await client.get("/ready")).status_code == 200
    probed.health.add_check("engine", lambda: "loading the model")
    response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["engine: loading the model"]


async def test_worker_reports_standby_when_otherwise_ready(probed, client):
    """An operator depends on it: it sends no canary to a worker that could not answer."""
    missing = ["loading the model"]
    probed.health.add_check("engine", lambda: missing[0] if missing else None)
    probed.health.stand_by_until(lambda: probed.standby)
    assert (await client.get("/ready")).json()["status"] == "unavailable"
    missing.clear()
    response = await client.get("/ready")
    assert (response.status_code, response.json()["status"]) == (503, "standby")
    assert (await client.post("/offer")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    probed.ready = None
    answer = await client.post("/offer")
    assert (answer.status_code, answer.json()["code"]) == (409, "busy")


async def test_adapters_of_requests_have_vllms_own_series(probed, client):
    name = "vllm:lora_requests_info{"
    assert name not in (await client.get("/metrics")).text
    adapters = tuple(ServedAdapter(name=each, digest="0a" * 16, rank=8, root="") for each in ("a", "b", "c"))
    probed.ready = msgspec.structs.replace(probed.ready, adapters=adapters, adapter_memory=AdapterMemory(limit=8))
    probed.stats = idle_stats(running_adapters=("a", "b"), waiting_adapters=("c",))
    before = time.time()
    [line] = [line for line in (await client.get("/metrics")).text.split("\n") if line.startswith(name)]
    labels, _, value = line.rpartition(" ")
    assert labels == f'{name}max_lora="8",running_lora_adapters="a,b",waiting_lora_adapters="c"}}'
    assert before <= float(value) <= time.time()


async def test_metrics_have_vllm_like_names(probed, client):
    text = (await client.get("/metrics")).text
    assert "tandem_worker_num_requests_running 3.0" in text
    assert "tandem_worker_generation_tokens_total 12.0" in text
    assert "tandem_worker_kv_cache_usage_perc 0.0" in text
    assert "tandem_worker_index_replays_total 2.0" in text
    assert "tandem_worker_offered 0.0" in text


async def test_capabilities_are_reported_before_the_first_request(probed, client):
    probed.stats = None
    text = (await client.get("/metrics")).text
    assert "tandem_worker_max_running_requests 8.0" in text
    assert "tandem_worker_prefill_tokens_per_second 1000.0" in text
    probed.stats = idle_stats(prefill_tokens_per_s=250.0, oldest_wait_s=1.5)
    text = (await client.get("/metrics")).text
    assert "tandem_worker_prefill_tokens_per_second 250.0" in text
    assert "tandem_worker_oldest_wait_seconds 1.5" in text
    assert "tandem_worker_stats_age_seconds 0.25" in text


async def test_queue_wait_reason_is_a_label_absent_if_none_wait(probed, client):
    assert "queue_head_waits{" not in (await client.get("/metrics")).text
    probed.stats = idle_stats(waiting=1, head_waits="no_pages")
    assert 'tandem_worker_queue_head_waits{reason="no_pages"} 1.0' in (await client.get("/metrics")).text


async def test_health_before_engine_reports_covers_service_only(probed, client):
    probed.stats = None
    text = (await client.get("/metrics")).text
    assert "tandem_worker_registered 1.0" in text
    assert "num_requests_running" not in text


async def test_every_engine_statistic_is_exported(client):
    text = (await client.get("/metrics")).text
    apart = {"speculation", "links", "quarantined_for", "fenced_writers", "prefix_fetch", "state_anchors"}
    apart |= {"running_adapters", "waiting_adapters"}
    flat = [name for name in EngineStats.__struct_fields__ if name not in apart]
    flat += PrefixFetchStats.__struct_fields__
    of_two_families = {"cached_tokens_total", "host_cached_tokens_total", "disk_cached_tokens_total"} | {
        "kernels_compiled_starting", "kernels_compiled_serving",
    }  # fmt: skip
    flat = [name for name in flat if name not in of_two_families]
    assert text.count("# TYPE tandem_worker_") == len(ServiceNumbers.__slots__) + 2 + len(flat) + 2 + 2 + len(
        FORMER_NAMES
    )
    assert "spec_decode" not in text


async def test_fit_of_step_times_is_exported_by_its_parts(probed, client):
    assert "tandem_worker_step_fit_seconds{" not in (await client.get("/metrics")).text
    fit = StepFit(base_s=0.004, sequence_s=1e-4, kv_token_s=1e-7, chunk_token_s=2e-5)
    probed.stats = idle_stats(step_fit=fit, step_base_s=0.003)
    text = (await client.get("/metrics")).text
    assert 'tandem_worker_step_fit_seconds{part="base"} 0.004' in text
    assert 'tandem_worker_step_fit_seconds{part="chunk_token"} 2e-05' in text
    assert "tandem_worker_step_base_seconds 0.003" in text


async def test_role_and_drain_are_exported(probed, client):
    text = (await client.get("/metrics")).text
    assert 'tandem_worker_role{role="prefill"} 1.0' in text
    assert "tandem_worker_draining 0.0" in text
    probed.draining_s = 2.5
    text = (await client.get("/metrics")).text
    assert "tandem_worker_draining 1.0" in text
    assert "tandem_worker_drain_seconds 2.5" in text


async def test_role_is_passed_on_and_an_unknown_one_is_not(probed, client):
    answer = await client.post("/role", json={"role": "decode"})
    assert (answer.status_code, probed.roles) == (200, [Role.DECODE])
    assert (await client.post("/role", json={"role": "cook"})).status_code == 400
    assert (await client.post("/role", json={})).status_code == 400
    assert probed.roles == [Role.DECODE]


async def test_links_are_exported_by_worker_id(probed, client):
    measured = LinkReport(peer="d1@7", bytes_per_s=2e9, latency_s=0.001, transport=LinkTransport.SHM)
    slow = LinkReport(peer="d2@7", transport=LinkTransport.TCP, condition="expected rdma, got tcp", broken=True)
    probed.stats = idle_stats(links=(measured, slow))
    text = (await client.get("/metrics")).text
    assert 'tandem_link_bytes_per_second{peer="d1",transport="shm"} 2e+09' in text
    assert 'tandem_link_bytes_per_second{peer="d2"' not in text
    assert 'tandem_link_broken{peer="d2"} 1.0' in text
    assert 'tandem_link_conditions{peer="d2"} 1.0' in text
    assert 'tandem_link_conditions{peer="d1"} 0.0' in text


async def test_failed_load_is_reported_with_its_reason(probed, client):
    digest = "5" * 32
    failed = FailedAdapter(name="sql", digest=digest, reason="adapter 'sql' cannot be loaded here: no such folder")
    changed = msgspec.structs.replace(failed, digest="6" * 32)
    probed.ready = msgspec.structs.replace(
        probed.ready, adapter_memory=AdapterMemory(limit=8, failed=(failed, changed))
    )
    report = (await client.get("/adapters")).json()
    assert report["memory"]["failed"][0] == {"name": "sql", "digest": digest, "reason": failed.reason}
    text = (await client.get("/metrics")).text
    assert 'tandem_worker_lora_adapter_load_failed{adapter_name="sql"} 1.0' in text


def test_former_names_end_with_the_window_of_release_0():
    assert RELEASE <= LAST_OF_FORMER_NAMES, "remove former names of counters here, in the code and in observability.md"


@pytest.mark.parametrize(("name", "former"), FORMER_NAMES)
async def test_renamed_counter_has_equal_value_under_its_former_name(probed, client, name, former):
    probed.stats = idle_stats(
        poison_requests_total=3,
        corrupted_requests_total=4,
        transfer_unexpected_errors_total=5,
        prefix_fetch=PrefixFetchStats(requested_total=6, served_total=7, served_pages_total=8),
    )
    values = re.findall(rf"^tandem_worker_(?:{name}|{former})_total (.*)$", (await client.get("/metrics")).text, re.M)
    assert len(values) == 2
    assert values[0] == values[1] != "0.0"


async def test_prefix_cache_hit_metrics_split_by_tier(probed, client):
    probed.stats = idle_stats(cached_tokens_total=100, host_cached_tokens_total=30, disk_cached_tokens_total=8)
    text = (await client.get("/metrics")).text
    for tier, tokens in (("device", 62.0), ("host", 30.0), ("disk", 8.0)):
        assert f'tandem_worker_prefix_cache_hit_tokens_total{{tier="{tier}"}} {tokens}' in text


async def test_compiled_kernels_are_exported_by_when_they_were(probed, client):
    probed.stats = idle_stats(kernels_compiled_starting=31, kernels_compiled_serving=2)
    text = (await client.get("/metrics")).text
    for when, kernels in (("starting", 31.0), ("serving", 2.0)):
        assert f'tandem_worker_kernel_compiles_total{{when="{when}"}} {kernels}' in text


async def test_speculation_statistics_are_exported(probed, client):
    speculation = SpeculationStats(
        proposer="NGRAM", runs_total=4, drafted_total=12, accepted_total=9, accept_length=3.25, propose_s=0.5
    )
    probed.stats = msgspec.structs.replace(probed.stats, speculation=speculation)
    text = (await client.get("/metrics")).text
    assert "tandem_worker_spec_decode_num_accepted_tokens_total 9.0" in text
    assert "tandem_worker_spec_decode_accept_length 3.25" in text


async def test_audit_is_passed_on_or_times_out(probed, client):
    assert (await client.get("/audit")).status_code == 504
    probed.report = AuditReport(
        nonce=1, problems=("leak",), idle=True, free_pages=1, tree_pages=2, private_pages=3, held_pages=4
    )
    body = (await client.get("/audit")).json()
    assert (body["problems"], body["held_pages"]) == (["leak"], 4)


async def test_drain_needs_a_post(probed, client):
    assert (await client.get("/drain")).status_code == 405
    assert probed.drained == 0
    assert (await client.post("/drain")).status_code == 202
    assert probed.drained == 1


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        ("/abort", b'{"rid": "a"}', AbortRequests(nonce=7, rid="a")),
        ("/abort", b'{"all": true}', AbortRequests(nonce=7, rid=None)),
        ("/flush_cache", b"", FlushCache(nonce=7)),
        ("/pause", b"", PauseGeneration(nonce=7, mode=PauseMode.IN_PLACE)),
        ("/pause", b'{"mode": "retract"}', PauseGeneration(nonce=7, mode=PauseMode.RETRACT)),
        ("/resume", b"{}", ResumeGeneration(nonce=7)),
        ("/reload", b'{"path": "/m"}', ReloadWeights(nonce=7, path="/m")),
        (
            "/load_lora_adapter",
            b'{"lora_name": "a", "lora_path": "/a"}',
            LoadAdapter(nonce=7, name="a", path="/a", replaces=False),
        ),
        ("/unload_lora_adapter", b'{"lora_name": "a"}', UnloadAdapter(nonce=7, name="a")),
        ("/profile", b'{"steps": 3, "seconds": 1}', StartProfile(nonce=7, steps=3, seconds=1.0)),
        ("/profile/stop", b"", StopProfile(nonce=7)),
    ],
)
async def test_order_reaches_the_engine_and_its_answer_the_operator(probed, client, path, body, order):
    assert (await client.get(path)).status_code == 405
    response = await client.post(path, content=body)
    assert (response.status_code, response.json()) == (200, {"message": "done", "pages": 3})
    assert probed.orders == [order]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort", b"{}"),
        ("/abort", b'{"rid": "a", "all": true}'),
        ("/abort", b'{"id": "a"}'),
        ("/abort", b'{"rid": 5}'),
        ("/abort", b"[" * 5000),
        ("/abort", b'{"rid": "\xff"}'),
        ("/pause", b'{"mode": "sideways"}'),
        ("/flush_cache", b'{"wait": 1}'),
        ("/reload", b"x" * 100_000),
        ("/load_lora_adapter", b'{"lora_name": "mini", "lora_path": "/a"}'),
        ("/load_lora_adapter", b'{"lora_name": "a"}'),
        ("/unload_lora_adapter", b'{"lora_name": "a", "lora_int_id": 1}'),
        ("/profile", b'{"steps": "many"}'),
    ],
)
async def test_order_that_makes_no_sense_never_reaches_the_engine(probed, client, path, body):
    response = await client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["code"] == "bad_order"
    assert probed.orders == []


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (OrderRefusedError(OrderRefused(nonce=7, code="busy", message="2 requests hold KV")), 409, "busy"),
        (OrderRefusedError(OrderRefused(nonce=7, code="checkpoint_error", message="gone")), 400, "checkpoint_error"),
        (TimeoutError(), 504, "timeout"),
    ],
)
async def test_failed_order_reports_reason(probed, client, outcome, status, code):
    probed.outcome = outcome
    response = await client.post("/flush_cache")
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert response.json()["message"]


def test_taken_port_is_named(probed):
    first = HealthServer(build_app(probed.probes()), "127.0.0.1", 0)
    port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(StartupError, match=f"127.0.0.1:{port} .*--health-host or --health-port"):
        HealthServer(build_app(probed.probes()), "127.0.0.1", port)
    first.close()


def from_machine(probed, address: str, **access) -> httpx.AsyncClient:
    probes = probed.probes()
    app = build_app(replace(probes, order_access=replace(probes.order_access, **access)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, client=(address, 5)), base_url="http://worker")


ADDRESSES = ["10.0.0.7", "2001:db8::7", "127.0.0.1", "::1", "::ffff:127.0.0.1", "not an address"]


@pytest.mark.parametrize("address", ADDRESSES)
async def test_orders_without_the_token_are_refused(probed, address):
    async with from_machine(probed, address) as client:
        for path in ("/live", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for path in ("/drain", "/reload", "/role", "/abort", "/pause"):
            refused = await client.post(path, headers={"x-forwarded-for": "127.0.0.1", **JSON})
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        assert (await client.get("/audit")).status_code == (await client.get("/links")).status_code == 401
    assert (probed.drained, probed.orders, probed.roles) == (0, [], [])


async def test_allowed_remote_orders_need_no_token(probed):
    async with from_machine(probed, "10.0.0.7", needs_token=False) as client:
        assert (await client.post("/drain", headers=JSON)).status_code == 202


@pytest.mark.parametrize("address", ADDRESSES)
async def test_orders_with_the_token_are_taken(probed, address):
    async with from_machine(probed, address) as client:
        assert (await client.post("/drain", headers=ORDER)).status_code == 202
        for wrong in (f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, "Bearer ", "", "Bearer \u00fc"):
            refused = await client.post("/drain", headers={"authorization": wrong.encode(), **JSON})
            assert refused.status_code == 401
        twice = [*ORDER.items(), ("authorization", f"Bearer {TOKEN}")]
        assert (await client.post("/drain", headers=twice)).status_code == 401
    assert probed.drained == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://worker:81"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "worker.evil.example:9101"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://worker", "sec-fetch-site": "same-origin"}, 202),
        ({"host": "[::1]:9101"}, 202),
        ({"host": "10.0.0.7:9101"}, 202),
        ({"host": "localhost:9101", "origin": "http://localhost:9101"}, 202),
        ({"content-type": "application/json; charset=utf-8"}, 202),
    ],
)
@pytest.mark.parametrize("needs_token", [True, False])
async def test_orders_of_pages_in_a_browser_are_refused(probed, headers, status, needs_token):
    async with from_machine(probed, "127.0.0.1", needs_token=needs_token) as client:
        assert (await client.post("/drain", headers=ORDER | headers)).status_code == status
    assert probed.drained == (status == 202)


async def test_order_without_a_content_type_is_refused(probed):
    async with from_machine(probed, "127.0.0.1") as client:
        assert (await client.post("/drain", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 415


def test_health_endpoint_on_wildcard_uses_advertised_address(probed):
    for host, advertised, known in (
        ("0.0.0.0", "10.0.0.7", "http://10.0.0.7:"),
        ("0.0.0.0", "2001:db8::7", "http://[2001:db8::7]:"),
        ("127.0.0.1", "10.0.0.7", "http://127.0.0.1:"),
    ):
        server = HealthServer(build_app(probed.probes()), host, 0, advertised=advertised)
        server.close()
        assert server.endpoint.startswith(known)


async def test_rates_are_streamed_by_line_with_result_last(probed, client):
    probed.rates = Rates(
        device="cpu",
        tensor_parallel_size=1,
        pool_tokens=100,
        token_bytes=1.0,
        transfer_bytes_per_s=0.0,
        prefill=(Prompt(tokens=64, seconds=0.1),),
        decode=(DecodeStep(batch=1, context=64, seconds=0.01),),
    )
    response = await client.post("/rates", json={"force": True})
    lines = [msgspec.json.decode(line) for line in response.text.splitlines()]
    assert (response.status_code, probed.forced) == (200, [True])
    assert lines[0] == {"done": 0, "total": 2, "what": "prompt of 64 tokens"}
    assert msgspec.convert(lines[1]["rates"], Rates) == probed.rates


async def test_rates_that_fail_later_end_with_the_reason(probed, client):
    response = await client.post("/rates", json={"force": True})
    assert msgspec.json.decode(response.text.splitlines()[-1]) == {"error": "the engine was silent"}


@pytest.mark.parametrize(("body", "status"), [("{}", 409), ('{"forced": true}', 400), ('{"force": 1}', 400)])
async def test_rates_are_refused_with_a_status(client, body, status):
    response = await client.post("/rates", content=body)
    assert response.status_code == status


@pytest.mark.parametrize("lines", [0, 1])
async def test_client_that_leaves_ends_the_measurement(probed, lines):
    over = asyncio.Event()
    left = asyncio.Event()

    async def measure(_):
        try:
            if not lines:
                left.set()
            yield Progress(0, 2, "prompt of 64 tokens")
            await asyncio.Event().wait()
        finally:
            over.set()

    body = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive():
        message = next(body, None)
        if message is None:
            await left.wait()
        return message or {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            left.set()

    headers = [(name.encode(), value.encode()) for name, value in {**ORDER, "host": "worker"}.items()]
    scope = {"type": "http", "method": "POST", "path": "/rates", "query_string": b"", "headers": headers}
    await build_app(replace(probed.probes(), measure_rates=measure))(scope, receive, send)
    async with asyncio.timeout(5):
        await over.wait()
