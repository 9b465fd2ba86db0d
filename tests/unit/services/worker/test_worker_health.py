import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tandem_engine.messages.control import AuditReport, EngineStats, SpeculationStats
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.worker.health import HealthServer, WorkerProbes, build_app
from tandem_services.worker.metrics import ServiceNumbers, WorkerCollector
from tandem_testing.mock_engine_process import idle_stats


class Probed:
    """What the endpoints of one test see."""

    def __init__(self) -> None:
        self.health = Health()
        self.stalled_s = 0.0
        self.stats: EngineStats | None = idle_stats(running=3, evictable_pages=1, output_tokens_total=12)
        self.drained = 0
        self.report: AuditReport | None = None

    async def audit(self) -> AuditReport:
        if self.report is None:
            raise TimeoutError
        return self.report

    def drain(self) -> None:
        self.drained += 1

    def probes(self) -> WorkerProbes:
        registry = CollectorRegistry()
        numbers = ServiceNumbers(registered=True, offered=False, index_replays=2, redis_failures=5)
        registry.register(WorkerCollector(lambda: self.stats, lambda: numbers))
        return WorkerProbes(
            health=self.health,
            registry=registry,
            stalled_s=lambda: self.stalled_s,
            audit=self.audit,
            drain=self.drain,
        )


@pytest.fixture
def probed():
    return Probed()


@pytest.fixture
async def client(probed):
    transport = httpx.ASGITransport(app=build_app(probed.probes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
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


async def test_metrics_have_vllm_like_names(probed, client):
    text = (await client.get("/metrics")).text
    assert "tandem_worker_num_requests_running 3.0" in text
    assert "tandem_worker_generation_tokens_total 12.0" in text
    assert "tandem_worker_kv_cache_usage_perc 0.0" in text
    assert "tandem_worker_index_replays_total 2.0" in text
    assert "tandem_worker_offered 0.0" in text


async def test_the_reason_why_requests_wait_is_a_label_and_absent_when_none_do(probed, client):
    assert "queue_head_waits{" not in (await client.get("/metrics")).text
    probed.stats = idle_stats(waiting=1, head_waits="no_pages")
    assert 'tandem_worker_queue_head_waits{reason="no_pages"} 1.0' in (await client.get("/metrics")).text


async def test_before_the_engine_reports_only_the_service_speaks(probed, client):
    probed.stats = None
    text = (await client.get("/metrics")).text
    assert "tandem_worker_registered 1.0" in text
    assert "num_requests_running" not in text


async def test_every_statistic_is_exported_and_the_usage_computed(client):
    text = (await client.get("/metrics")).text
    flat = [name for name in EngineStats.__struct_fields__ if name != "speculation"]
    assert text.count("# TYPE tandem_worker_") == len(ServiceNumbers.__slots__) + len(flat) + 1
    assert "spec_decode" not in text


async def test_an_engine_that_speculates_exports_what_became_of_its_drafts(probed, client):
    speculation = SpeculationStats(
        proposer="NGRAM", runs_total=4, drafted_total=12, accepted_total=9, accept_length=3.25, propose_s=0.5
    )
    probed.stats = msgspec.structs.replace(probed.stats, speculation=speculation)
    text = (await client.get("/metrics")).text
    assert "tandem_worker_spec_decode_num_accepted_tokens_total 9.0" in text
    assert "tandem_worker_spec_decode_accept_length 3.25" in text


async def test_an_audit_is_passed_on_or_times_out(probed, client):
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


def test_a_taken_port_is_named(probed):
    first = HealthServer(probed.probes(), "127.0.0.1", 0)
    port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
        HealthServer(probed.probes(), "127.0.0.1", port)
    first.close()
