from tandem_engine.config import SchedulerConfig
from tandem_engine.executor.memory_profile import largest_step, measure_activations, profile_pages
from tandem_engine.forward.batch import ForwardMode

LIMITS = SchedulerConfig(max_prefill_tokens=100, chunked_prefill_size=32, max_running_requests=10, context_length=64)


def test_step_stands_at_every_limit():
    batch = largest_step(LIMITS, page_size=8)
    assert batch.extend_lens.tolist() == [32, 32, 32, 4, 1, 1, 1, 1, 1, 1]
    assert (batch.mode, batch.num_extend) == (ForwardMode.MIXED, 4)
    assert len(batch.sample_index) == 10
    assert int(batch.out_cache_loc.max()) < profile_pages(LIMITS, 8) * 8
    assert int(batch.out_cache_loc.min()) >= 8, "the dummy page stays finite"


def test_context_shorter_than_a_chunk_is_the_longest_sequence():
    limits = SchedulerConfig(
        max_prefill_tokens=100, chunked_prefill_size=512, max_running_requests=2, context_length=40
    )
    assert largest_step(limits, page_size=16).extend_lens.tolist() == [40, 40, 20]


def test_memory_kept_after_first_step_is_not_counted():
    seen: list[int] = []

    class Meter:
        def total(self) -> int:
            return 0

        available = used = total

        def peak_growth(self, run) -> int:
            seen.append(-1)
            run()
            return 7

    assert measure_activations(lambda batch: seen.append(batch.num_tokens), Meter(), LIMITS, page_size=8) == 7
    assert seen == [10, -1, 106]
