"""What a step costs the scheduler: bytecodes of Python, which no machine has a part in."""

import gc

import pytest

from tandem_testing.fake_executors import EagerExecutor
from tandem_testing.opcodes import opcodes_of, uncounted
from tandem_testing.scheduler_builders import make_engine, make_message

PAGE = 4
SHORT, LONG = 10 * PAGE, 500 * PAGE
STEPS = 4 * PAGE
"""Whole pages, so that each run takes as many new ones."""


class Uncounted:
    """The fake model, which looks at all of the context in every step."""

    def __init__(self, model):
        self._model = model
        self.copy = model.copy

    def forward(self, batch):
        with uncounted():
            return self._model.forward(batch)


def work_of_steps(prompt_len: int, count: int, **config: object) -> int:
    """Bytecodes of `STEPS` steps in which `count` requests decode behind prompts of so many tokens."""
    engine = make_engine(
        executor=lambda model: EagerExecutor(Uncounted(model)),
        page_size=PAGE,
        usable_pages=count * (LONG // PAGE + 40),
        context_length=LONG + 200,
        chunked_prefill_size=LONG,
        max_prefill_tokens=LONG,
        audit_every_step=False,
        **config,
    )
    for number in range(count):
        engine.add(make_message(f"r{number}", [number + 1] * prompt_len, max_tokens=100))
    while len(engine.received) < count:
        engine.step()
    # What is made again for other samplers is none of a step's own work.
    engine.step(PAGE)
    return opcodes_of(lambda: engine.step(STEPS))


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_step_bytecodes_do_not_grow_with_context_length(overlap):
    short, long = (work_of_steps(length, 3, enable_overlap=overlap) for length in (SHORT, LONG))
    assert 0 < long <= short


def test_decode_step_bytecodes_grow_linearly_with_requests():
    few, some, many = (work_of_steps(SHORT, count) for count in (2, 4, 8))
    assert many - some <= 2.1 * (some - few)


def test_garbage_that_others_have_left_does_not_count():
    """It is found whenever so many objects have been made, and its finalizers may be Python."""
    found = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            found.append(self)

    def work() -> list[list[int]]:
        return [[] for _ in range(2 * gc.get_threshold()[0])]

    opcodes_of(work)  # the first time an interpreter may adapt to it
    alone = opcodes_of(work)
    Garbage()
    assert opcodes_of(work) == alone
    assert found
