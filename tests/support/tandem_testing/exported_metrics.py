"""Every metric that Tandem exports, each with at least one sample, so that its labels can be seen."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from tandem_engine.base.names import LinkTransport
from tandem_engine.config import Role
from tandem_engine.messages.control import AdapterMemory, FailedAdapter, ServedAdapter
from tandem_engine.messages.outputs import TransferReport
from tandem_engine.messages.stats import LinkReport, SpeculationStats, StateAnchorStats, StepFit
from tandem_services.common.metrics import MetricFamilies, add_release
from tandem_services.common.recording import RecordingErrors
from tandem_services.common.span_export import SpanCounts, SpanMetrics
from tandem_services.gateway.access.tenants import AccessMetrics
from tandem_services.gateway.models.file import ModelsFileMetrics
from tandem_services.gateway.models.tokenizer_loads import counted_loads
from tandem_services.gateway.objectives import Objectives, SloMode
from tandem_services.gateway.observe.cells import watch_cells
from tandem_services.gateway.observe.explain import AttemptRecord, ChoiceRecord, RequestRecord
from tandem_services.gateway.observe.metrics import PREFIX as GATEWAY_PREFIX
from tandem_services.gateway.observe.metrics import GatewayMetrics, HttpMetrics
from tandem_services.gateway.observe.predictions import Predictions
from tandem_services.gateway.queueing.admission import QueueMetrics
from tandem_services.gateway.queueing.slo_admission import SloAdmission
from tandem_services.router.calibration import Calibration
from tandem_services.router.cells.cell_router import CellFigures
from tandem_services.router.decision import Latency, OtherCell, Placement, ScoreTerm
from tandem_services.router_server.routing_service import RouterMetrics
from tandem_services.worker.metrics import ServiceNumbers, WorkerCollector
from tandem_services.worker.tracing import trace_metrics
from tandem_testing.mock_engine_process import idle_stats, ready_message
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock

FIT = StepFit(base_s=0.004, sequence_s=1e-4, kv_token_s=1e-7, chunk_token_s=2e-5)


def gateway_metrics() -> list[Metric]:
    """Those of a gateway with API keys, other cells and a models file, on which everything has happened once."""
    registry = CollectorRegistry()
    add_release(registry)
    families = MetricFamilies(registry)
    http, access = HttpMetrics(families), AccessMetrics(registry)
    gateway, queue = GatewayMetrics(families, model="m"), QueueMetrics(families, model="m")
    http.answered("/v1/completions", 200, model="m")
    http.disconnected(model="m")
    gateway.attempt_ended("finished")
    predictions = Predictions(families, model="m", clock=ServiceClock())
    predictions.finished(predicted_record())
    reject_and_keep(families, predictions)
    moved = resumed_record()
    moved.choices[0].attempts[1].cell = OtherCell("west", "no_worker")
    gateway.finished(moved)
    access.keys_loaded(1)
    access.refused("unknown")
    access.limited("t", "requests")
    access.used("t", 5)
    queue.refused("full")
    queue.waiting({"t": 1})
    west = CellFigures(name="west", reachable=True, prefill_workers=1, decode_workers=1, awake=False)
    watch_cells(families, lambda: [west], model="m", names=["west"])
    ModelsFileMetrics(families, served=1).refused()
    counted_loads(families, ServiceClock()).on_failure("m")
    registry.register(SpanMetrics(GATEWAY_PREFIX, SpanCounts()))
    registry.register(RecordingErrors(GATEWAY_PREFIX))
    return list(registry.collect())


def router_metrics() -> list[Metric]:
    """Those of a stand-alone router that has chosen once and refused once."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.answered("/v1/choose", 200, model="")
    metrics.chose("http", "redis", "pair")
    metrics.refused("ext_proc", 503)
    metrics.tokenizer_failed("m")
    return list(registry.collect())


def worker_metrics() -> list[Metric]:
    """Those of a worker that speculates, has states, a peer and an adapter, and lets a request wait."""
    speculation = SpeculationStats(
        proposer="NGRAM", runs_total=4, drafted_total=12, accepted_total=9, accept_length=3.25, propose_s=0.5
    )
    adapter = ServedAdapter(name="sql", digest="0a" * 16, rank=8, root="sql")
    failed = FailedAdapter(name="law", digest="0b" * 16, reason="no such folder")
    memory = AdapterMemory(limit=2, resident=(adapter.digest,), failed=(failed,))
    link = LinkReport(peer="d1@7", bytes_per_s=2e9, latency_s=0.001, transport=LinkTransport.SHM)
    anchors = StateAnchorStats(slots=72, slot_bytes=77 << 20, kept=9, provisional=4, replaced_total=0)
    stats = idle_stats(
        speculation=speculation, links=(link,), head_waits="no_pages", waiting=1, state_anchors=anchors, step_fit=FIT
    )
    service = ServiceNumbers(
        registered=True,
        offered=True,
        index_replays=0,
        redis_failures=0,
        role=Role.DECODE,
        draining_s=None,
        ready=msgspec.structs.replace(ready_message("d0@1"), adapters=(adapter,), adapter_memory=memory),
    )
    return [*WorkerCollector(lambda: stats, lambda: service).collect(), *trace_metrics(SpanCounts(), unreported=0)]


class _Exported(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def exposition_of(metrics: Iterable[Metric]) -> bytes:
    """What `/metrics` would answer with them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exported(metrics))
    return generate_latest(registry)


def labels_of_series(metrics: Iterable[Metric]) -> dict[str, frozenset[str]]:
    """Name of each series as a query would have it (`…_bucket`, `…_total`) → its labels."""
    return {sample.name: frozenset(sample.labels) for metric in metrics for sample in metric.samples}


def resumed_record() -> RequestRecord:
    """Of a request whose first worker died after five tokens."""
    lost = _attempt(resumed_tokens=0, outcome="worker_lost", matched_tokens=16)
    resumed = _attempt(resumed_tokens=5, outcome="finished", matched_tokens=0)
    choice = ChoiceRecord(
        index=0,
        attempts=[lost, resumed],
        output_tokens=9,
        transfer=TransferReport(pages=3, bytes=96, pages_reused=0, wait_s=0.004, exposed_s=0.0004),
    )
    return RequestRecord(
        request_id="r",
        client_request_id=None,
        endpoint="/v1/completions",
        model="m",
        requested_model="m",
        stream=False,
        prompt_tokens=20,
        n=1,
        created=0,
        choices=[choice],
        e2e_s=0.3,
    )


def reject_and_keep(families: MetricFamilies, predictions: Predictions) -> None:
    """A promise of Retry-After whose time has come."""
    clock = ServiceClock()
    admission = SloAdmission(families, model="m", mode=SloMode.STRICT, clock=clock, predictions=predictions)
    admission.promises.make("t", drain_s=1.0, work_s=0.0)
    clock.advance(2.0)
    latency = Latency(terms=(ScoreTerm("prefill_compute", 0.1),), itl_s=0.01, kind="k", decode_kind="k")
    choice = replace(make_choice("r", make_view("w")), latency=latency)
    admission.judge(choice, Objectives(ttft_s=9.0), tenant="t", priority=0, waited_s=0.0, work_s=lambda: 0.0)


def predicted_record() -> RequestRecord:
    """Of a request with objectives, whose latency was predicted and measured."""
    latency = Latency(terms=(ScoreTerm("prefill_compute", 0.1),), itl_s=0.01, kind="k", decode_kind="k")
    attempt = _attempt(resumed_tokens=0, outcome="finished", matched_tokens=0)
    attempt.predicted = Calibration().predict(latency, Placement.PAIR, gateway_wait_s=0.0)
    record = resumed_record()
    record.status, record.objectives = 200, Objectives(ttft_s=1.0, itl_s=0.1)
    record.choices = [ChoiceRecord(index=0, attempts=[attempt], ttft_s=0.1, itl_s=0.01, finish_reason="length")]
    return record


def _attempt(*, resumed_tokens: int, outcome: str, matched_tokens: int) -> AttemptRecord:
    return AttemptRecord(
        decode="d@1",
        prefill="p@1",
        source="redis",
        placement="pair",
        terms=(),
        matched_tokens=matched_tokens,
        fetch=None,
        resumed_tokens=resumed_tokens,
        outcome=outcome,
    )
