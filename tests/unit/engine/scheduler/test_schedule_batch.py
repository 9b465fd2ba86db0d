"""The device view of a step."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.forward.batch import RESOLVE, ForwardMode
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.finishing import PenaltySlots
from tandem_engine.scheduler.prefill_adder import Extend
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.schedule_batch import BatchBuilder, ScheduleBatch
from tandem_engine.scheduler.stop import ModelFacts, StopRule
from tandem_testing.memory_builders import make_memory

FACTS = ModelFacts(vocab_size=100, eos_token_ids=frozenset({0}), context_length=200)


class Bench:
    """Requests with KV, and a builder."""

    def __init__(self, page_size: int = 4) -> None:
        self.memory = make_memory(page_size=page_size, usable_pages=400, max_rows=16, max_pages=80)
        self.builder = BatchBuilder(memory=self.memory, stop=StopRule(model=FACTS), slots=PenaltySlots())

    def request(
        self, prompt: int, *, outputs: int = 0, launched: int = 0, room: int = 1, **sampling: object
    ) -> Request:
        """`prompt` prompt and `outputs` output tokens, `launched` of them computed; pages for `room` more."""
        params = SamplingParams(max_tokens=50, **{"temperature": 0.0, **sampling})
        req = Request(rid=f"r{id(self)}", origin_input_ids=tuple(range(1, prompt + 1)), sampling=params)
        req.output_ids = list(range(50, 50 + outputs))
        req.extend_target = prompt + outputs
        req.launched_len = launched
        req.kv = self.memory.begin(req.fill_ids, space=BASE_SPACE, max_match=0)
        assert self.memory.ensure(req.kv, launched + room)
        return req

    def build(self, extends: list[Extend] = (), decodes: list[Request] = ()):
        return self.builder.build(ScheduleBatch(step=3, extends=list(extends), decodes=list(decodes)))


def test_extend_batch_has_tokens_positions_and_lengths():
    bench = Bench()
    whole = bench.request(5, room=5)
    chunk = bench.request(9, launched=4, room=3)
    batch = bench.build([Extend(req=whole, start=0, stop=5), Extend(req=chunk, start=4, stop=7)])
    assert batch.mode is ForwardMode.EXTEND
    assert batch.step == 3
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
    assert batch.extend_lens.tolist() == [5, 3]
    assert batch.seq_lens.tolist() == [5, 7]
    assert batch.rows.tolist() == [whole.kv.row, chunk.kv.row]
    first, second = whole.kv.pages
    _, middle = chunk.kv.pages
    assert batch.out_cache_loc.tolist() == [
        *range(first * 4, first * 4 + 4),
        second * 4,
        *range(middle * 4, middle * 4 + 3),
    ]
    assert batch.sample_index.tolist() == [0]
    assert batch.sampling.position.tolist() == [5]


def test_decode_batch_has_known_and_unresolved_tokens():
    bench = Bench()
    settled = bench.request(3, outputs=2, launched=4)
    flying = bench.request(8, outputs=0, launched=8)
    flying.tokens_in_flight = 1
    batch = bench.build(decodes=[settled, flying])
    assert batch.mode is ForwardMode.DECODE
    assert batch.num_extend == 0
    assert batch.input_ids.tolist() == [51, RESOLVE]
    assert batch.positions.tolist() == [4, 8]
    assert batch.seq_lens.tolist() == [5, 9]
    assert batch.sample_index.tolist() == [0, 1]
    assert batch.sampling.position.tolist() == [5, 9]


def test_recomputed_request_extends_over_prompt_and_output():  # [resume-as-extend]
    bench = Bench()
    req = bench.request(3, outputs=4, room=7)
    batch = bench.build([Extend(req=req, start=2, stop=7)])
    assert batch.input_ids.tolist() == [3, 50, 51, 52, 53]


def test_entries_past_the_last_page_name_the_dummy_page():
    bench = Bench()
    short, long = bench.request(1, launched=1, outputs=1), bench.request(9, launched=9, outputs=1)
    batch = bench.build(decodes=[short, long])
    assert batch.page_table.dtype is torch.int32
    assert batch.page_table.tolist() == [[short.kv.pages[0], 0, 0], long.kv.pages]


def test_page_table_is_a_copy():  # [row-snapshot]
    bench = Bench()
    req = bench.request(4, launched=4, outputs=1)
    batch = bench.build(decodes=[req])
    pages = list(req.kv.pages)
    bench.memory.release(req.kv, (), checkpoint=False, after_step=None)
    assert batch.page_table.tolist() == [pages]


def test_cursors_advance_when_the_step_is_launched():
    bench = Bench()
    chunk = bench.request(9, room=4)
    last = bench.request(4, room=4)
    decode = bench.request(3, outputs=1, launched=3)
    batch = ScheduleBatch(
        step=1, extends=[Extend(req=chunk, start=0, stop=4), Extend(req=last, start=0, stop=4)], decodes=[decode]
    )
    assert batch.samplers == [last, decode]
    batch.mark_launched()
    cursors = [(req.launched_len, req.steps_in_flight, req.tokens_in_flight) for req in batch.requests]
    assert cursors == [(4, 1, 0), (4, 1, 1), (4, 1, 1)]


def test_sampling_parameters_stand_in_the_order_of_samplers():
    bench = Bench()
    chunk = bench.request(9, room=4, temperature=0.9)
    greedy = bench.request(3, outputs=1, launched=3)
    warm = bench.request(3, outputs=1, launched=3, temperature=0.7, top_p=0.5, top_k=9, min_p=0.25, seed=-5, logprobs=2)
    sampling = bench.build([Extend(req=chunk, start=0, stop=4)], [greedy, warm]).sampling
    assert sampling.temperature.tolist() == [0.0, torch.tensor(0.7).item()]
    assert (sampling.top_k.tolist(), sampling.top_p.tolist()) == ([0, 9], [1.0, 0.5])
    assert (sampling.min_p.tolist(), sampling.seed.tolist()) == ([0.0, 0.25], [0, -5])
    assert sampling.logprobs == (-1, 2)
    assert sampling.logprob_ids is None
    assert not sampling.all_greedy


def test_named_tokens_stand_in_the_order_of_samplers():
    bench = Bench()
    sizes: tuple[tuple[int, ...], ...] = ((), (5, 9), (3,))
    requests = [bench.request(3, outputs=1, launched=3, logprobs=0, logprob_token_ids=ids) for ids in sizes]
    assert bench.build(decodes=requests).sampling.logprob_ids.tolist() == [[-1, -1], [5, 9], [3, -1]]
    assert bench.build(decodes=requests[:1]).sampling.logprob_ids is None


def test_top_k_of_one_is_greedy():
    bench = Bench()
    sampling = bench.build(decodes=[bench.request(3, outputs=1, launched=3, temperature=0.7, top_k=1)]).sampling
    assert sampling.all_greedy
    assert sampling.temperature.tolist() == [0.0]


def test_sampling_tensors_are_built_once_for_the_same_samplers():
    bench = Bench()
    requests = [bench.request(3, outputs=1, launched=3) for _ in range(3)]
    first, second = bench.build(decodes=requests).sampling, bench.build(decodes=requests).sampling
    assert first.temperature is second.temperature
    third = bench.build(decodes=requests[:2]).sampling
    assert third.temperature.tolist() == [0.0, 0.0]


def test_stop_ids_are_suppressed_per_request_until_min_tokens():
    bench = Bench()
    free = bench.request(3, outputs=1, launched=3)
    held = bench.request(3, outputs=1, launched=3, min_tokens=3, stop_token_ids=(8,))
    assert bench.build(decodes=[free]).sampling.suppress == ()
    assert bench.build(decodes=[free, held]).sampling.suppress == ((), (0, 8))
    held.tokens_in_flight = 2
    assert bench.build(decodes=[free, held]).sampling.suppress == ()


sequences = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 6), st.integers(0, 39), st.integers(1, 40)), min_size=1, max_size=5
)


@settings(deadline=None)
@given(page_size=st.sampled_from([1, 3, 4, 16]), extends=sequences, decodes=st.integers(0, 3))
def test_every_token_goes_to_the_slot_of_its_position(page_size, extends, decodes):
    bench = Bench(page_size)
    parts = []
    for prompt, outputs, computed, length in extends:
        total = prompt + outputs
        start = min(computed, total - 1)
        stop = min(total, start + length)
        parts.append(
            Extend(
                req=bench.request(prompt, outputs=outputs, launched=start, room=stop - start), start=start, stop=stop
            )
        )
    runners = [bench.request(4 + i, outputs=1, launched=4 + i) for i in range(decodes)]
    batch = bench.build(parts, runners)
    wanted = [(part.req, position) for part in parts for position in range(part.start, part.stop)]
    wanted += [(req, req.launched_len) for req in runners]
    assert batch.input_ids.tolist() == [req.fill_ids[position] for req, position in wanted]
    assert batch.positions.tolist() == [position for _, position in wanted]
    assert batch.out_cache_loc.tolist() == [
        req.kv.pages[position // page_size] * page_size + position % page_size for req, position in wanted
    ]
    assert batch.num_tokens == len(wanted)
