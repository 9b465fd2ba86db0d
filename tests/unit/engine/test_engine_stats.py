from tandem_engine.engine.stats import Throughput
from tandem_testing.scheduler_builders import ManualClock, make_engine, make_message


def test_throughput_is_measured_from_one_report_to_the_next():
    clock = ManualClock()
    throughput = Throughput(clock=clock)
    assert throughput.measure(50) == 0.0
    clock.time = 2.0
    assert throughput.measure(90) == 20.0
    assert throughput.measure(90) == 0.0, "no time has passed"
    clock.time = 3.0
    assert throughput.measure(90) == 0.0


def test_time_of_a_step_is_divided_among_its_phases():
    clock = TickingClock()
    engine = make_engine(enable_overlap=True)
    engine.scheduler._loop.clock = clock
    engine.add(make_message(max_tokens=10))
    engine.run()
    stats = engine.scheduler.stats()
    assert min(stats.plan_s, stats.launch_s, stats.settle_s, stats.wait_s) > 0.0
    assert abs(stats.plan_s + stats.launch_s + stats.settle_s - stats.schedule_s) < 1e-9


class TickingClock(ManualClock):
    """A millisecond passes at each reading."""

    def now(self) -> float:
        self.time += 0.001
        return self.time
