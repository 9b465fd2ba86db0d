"""The fake model finds the mistakes it is there to find."""

import pytest

from tandem_testing.fake_executor import next_token
from tandem_testing.scheduler_builders import Engine, make_engine, make_message


def running(**settings: object) -> Engine:
    engine = make_engine(page_size=4, usable_pages=8, **settings)
    engine.add(make_message(prompt=range(1, 11), max_tokens=20))
    engine.step(2)
    return engine


def differs(engine: Engine) -> bool:
    engine.run()
    with pytest.raises(AssertionError):
        engine.assert_expected()
    return True


def test_sound_engine_gives_the_expected_output():
    engine = running()
    engine.run()
    engine.assert_expected()


def test_late_write_becomes_a_wrong_token():
    engine = running()
    page = engine.scheduler.queues.running[0].kv.pages[1]
    engine.model.pool.page_view(page).add_(1)
    assert differs(engine)


def test_right_tokens_in_the_wrong_place_become_a_wrong_token():
    engine = running(radix=False)
    kv = engine.scheduler.queues.running[0].kv
    kv.pages[:2] = kv.pages[1::-1]
    engine.memory.rows.write(kv.row, 0, kv.pages)
    assert differs(engine)


def test_stale_row_becomes_a_wrong_token():
    engine = running(radix=False, audit_every_step=False)
    kv = engine.scheduler.queues.running[0].kv
    engine.memory.rows.write(kv.row, 1, kv.pages[:1])
    assert differs(engine)


def test_noise_is_a_function_of_seed_and_position_alone():
    draws = {
        (seed, position): next_token([1, 2, 3], vocab_size=10_000, noise=(seed, position))
        for seed in range(5)
        for position in range(5)
    }
    assert len(set(draws.values())) == len(draws)
    assert next_token([1, 2, 3], vocab_size=10_000, noise=(2, 3)) == draws[2, 3]


def test_suppressed_ids_are_never_sampled():
    token = next_token([1, 2, 3], vocab_size=50)
    assert next_token([1, 2, 3], vocab_size=50, suppress=(token,)) == (token + 1) % 50
