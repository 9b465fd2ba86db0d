import msgspec
import pytest

from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport, StepFit
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.registry import WorkerState, readable_fields
from tandem_services.router.row_values import FIGURES, Figures, kept_figures, read_figures
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.registration import LoadMonitor, describe, drain_summary
from tandem_testing.mock_engine_process import idle_stats, ready_message
from tandem_testing.service_clock import ServiceClock


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def monitor(clock):
    monitor = LoadMonitor(clock=clock, role=Role.PREFILL)
    monitor.begin()
    return monitor


def config() -> WorkerConfig:
    return WorkerConfig(
        model_path="/m", model_name="mini", role=Role.PREFILL, worker_id="w1", redis=RedisAddress(url="redis://h")
    )


def report_for(monitor: LoadMonitor, clock: ServiceClock, seconds: float, **stats: int) -> None:
    """Statistics twice a second whose loop count does or does not advance."""
    for _ in range(int(seconds * 2)):
        clock.advance(0.5)
        monitor.update(idle_stats(**stats))


def test_busy_engine_with_constant_loop_count_is_stalled(monitor, clock):  # [loop-progress]
    report_for(monitor, clock, 4, running=1, loop_count=7)
    assert monitor.state is WorkerState.STALLED
    monitor.update(idle_stats(running=1, loop_count=8))
    assert monitor.state is WorkerState.READY


def test_load_update_reports_state_changes(monitor):
    """A worker paused between two heartbeats was given what others moved away, and sent it away again."""
    assert not monitor.update(idle_stats())
    assert monitor.update(idle_stats(paused=True))
    assert not monitor.update(idle_stats(paused=True))
    assert monitor.update(idle_stats())


def test_host_load_rate_is_published_per_token(monitor):
    ready = ready_message("w1@1")

    def published() -> float:
        return describe(config(), ready, monitor, health_endpoint="").load.host_token_s

    assert published() == 0.0
    monitor.update(idle_stats())
    assert published() == 0.0
    monitor.update(idle_stats(host_load_pages_per_s=500.0))
    assert published() == pytest.approx(1 / (500 * ready.geometry.page_size))


def test_step_times_and_context_are_published(monitor):
    ready = ready_message("w1@1")
    fit = StepFit(base_s=0.004, sequence_s=1e-4, kv_token_s=1e-7, chunk_token_s=2e-5)
    monitor.update(idle_stats(step_base_s=0.003, step_fit=fit, free_pages=60, evictable_pages=10, total_pages=100))
    record = describe(config(), ready, monitor, health_endpoint="")
    assert (record.load.step_base_s, record.load.step_fit) == (0.003, fit)
    assert record.load.kv_tokens == 30 * ready.geometry.page_size
    assert record.kind == "mock//tp1"


def test_idle_engine_need_not_turn(monitor, clock):
    report_for(monitor, clock, 60, loop_count=7)
    assert monitor.state is WorkerState.READY


def test_engine_that_sends_nothing_is_stalled(monitor, clock):
    monitor.update(idle_stats())
    clock.advance(3.1)
    assert monitor.state is WorkerState.STALLED
    assert monitor.stalled_s == pytest.approx(3.1)


def test_work_after_idleness_gets_its_time(monitor, clock):
    report_for(monitor, clock, 60, loop_count=7)
    report_for(monitor, clock, 2, running=1, loop_count=7)
    assert monitor.state is WorkerState.READY


def test_draining_state_has_precedence_over_others(monitor, clock):
    monitor.draining = True
    clock.advance(100)
    assert monitor.state is WorkerState.DRAINING


def test_idle_counts_only_from_statistics_that_are_recent_enough(monitor, clock):
    monitor.update(idle_stats())
    began = clock.now()
    assert monitor.idle_since(began)
    assert not monitor.idle_since(began + 1)
    clock.advance(1)
    monitor.update(idle_stats(inflight=1))
    assert not monitor.idle_since(began + 1)
    monitor.update(idle_stats())
    assert monitor.idle_since(began + 1)


def test_load_before_first_statistics_is_that_of_self_test(monitor):
    record = describe(config(), ready_message("w1@5"), monitor, health_endpoint="http://h:1")
    assert record.load.prefill_rate == 1000.0
    assert record.load.step_s == record.load.step_base_s == 0.004
    assert record.load.room_tokens == 100 * 16
    assert record.view.incarnation == "w1@5"


def test_statistics_become_load(monitor):
    monitor.update(
        idle_stats(
            running=2,
            waiting=3,
            transferring=4,
            waiting_tokens=500,
            free_pages=10,
            evictable_pages=5,
            decode_step_s=0.01,
        )
    )
    load = describe(config(), ready_message("w1@5"), monitor, health_endpoint="http://h:1").load
    assert (load.queue_tokens, load.sequences, load.room_tokens, load.step_s) == (500, 9, 15 * 16, 0.01)
    assert load.token_bytes == 2 * 2 * 8 * 4


def test_token_bytes_count_all_ranks(monitor):
    ready = ready_message("w1@5")
    shared = msgspec.structs.replace(ready, geometry=msgspec.structs.replace(ready.geometry, tp_size=2))
    weights = [
        describe(config(), one, monitor, health_endpoint="http://h:1").load.token_bytes for one in (ready, shared)
    ]
    assert weights[1] == 2 * weights[0]


def test_record_has_current_role_of_the_worker(monitor):
    ready = ready_message("w1@1")
    monitor.role = Role.DECODE
    assert describe(config(), ready, monitor, health_endpoint="http://h:1").view.role is Role.DECODE


def test_drain_summary_counts_migrated_and_recomputed_requests():
    before = idle_stats(moved_total=2, move_failures_total=1)
    after = idle_stats(moved_total=9, move_failures_total=2, running=3)
    assert drain_summary(before, after) == ": 7 requests moved with their KV, 4 to be computed again elsewhere"
    assert drain_summary(None, after) == ""


def test_record_has_links_median_rate_and_conditions(monitor):
    slow = "expected rdma, got tcp"
    links = (
        LinkReport(peer="a@1", bytes_per_s=1e9, condition=slow),
        LinkReport(peer="b@1", bytes_per_s=3e9),
        LinkReport(peer="c@1", bytes_per_s=2e9, condition=slow),
        LinkReport(peer="d@1", problem="no answer"),
        LinkReport(peer="e@1", bytes_per_s=9e9, broken=True),
    )
    monitor.update(idle_stats(links=links))
    record = describe(config(), ready_message("w1@5"), monitor, health_endpoint="http://h:1")
    assert record.links == links
    assert record.link_rates == {"a@1": 1e9, "b@1": 3e9, "c@1": 2e9, "e@1": 0.0}
    assert record.load.transfer_rate == 2.5e9
    assert record.details["conditions"] == "2 of 5 links: expected rdma, got tcp"


def test_displayed_worker_fields_survive_the_redis_hash(monitor):
    monitor.update(idle_stats(running=2, free_pages=10, cached_tokens_total=7, output_tokens_per_s=1.5))
    record = describe(config(), ready_message("w1@5"), monitor, health_endpoint="http://h:1")
    read_back = {name: str(value) for name, value in readable_fields(record).items()}
    assert read_back.keys() >= FIGURES
    figures = read_figures(kept_figures(read_back))
    assert figures is not None
    assert (figures.running, figures.free_pages, figures.cached_tokens_total) == (2, 10, 7)
    assert (figures.output_tokens_per_s, figures.total_pages, figures.transport) == (1.5, 100, "none")


def test_worker_of_a_release_without_figures_has_none_to_show():
    assert read_figures(kept_figures({"role": "both", "free_pages": "3"})) == Figures(free_pages=3)
