"""Steps that raise and operators that pause, at random, with grammars and drafts: no output depends on it."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.fake_executors import EagerExecutor, LateExecutor
from tandem_testing.long_tests import examples
from tandem_testing.scheduler_builders import VOCAB, Engine, expected_output, make_engine, make_message
from tandem_testing.scripted_proposer import ScriptedProposer, wrong_every
from tandem_testing.toy_grammar import toy_grammar

POISON = 96
"""Occurs in prompts alone: no request may generate it."""
PREFIX = tuple(range(20, 32))


@dataclass
class Faults:
    """Prompts with the poison always raise; besides, the steps in `chance` do, if they have company."""

    chance: frozenset[int]

    def __call__(self, batch: ForwardBatch) -> None:
        extend_tokens = int(batch.extend_lens[: batch.num_extend].sum())
        if POISON in batch.input_ids[:extend_tokens].tolist():
            raise ValueError("poisoned")
        # Alone twice in a row would be a conviction.
        if batch.step in self.chance and batch.num_sequences > 1:
            raise RuntimeError("by chance")


@st.composite
def messages(draw):
    count = draw(st.integers(1, 6))
    built = []
    for i in range(count):
        own = draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
        prompt = [*PREFIX[: draw(st.integers(0, len(PREFIX)))], *own]
        if draw(st.integers(0, 3)) == 0:
            prompt.insert(draw(st.integers(0, len(prompt))), POISON)
        built.append(
            make_message(
                f"r{i}",
                prompt,
                max_tokens=draw(st.integers(1, 12)),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                seed=i,
                presence_penalty=draw(st.sampled_from([0.0, 1.0])),
                bad_words=((POISON,),),
                logprobs=draw(st.sampled_from([None, 1])),
                grammar=draw(st.sampled_from([None, None, toy_grammar(every=3)])),
            )
        )
    return built


configs = st.fixed_dictionaries(
    {
        "enable_overlap": st.booleans(),
        "radix": st.booleans(),
        "page_size": st.sampled_from([1, 4]),
        "enable_mixed_chunk": st.booleans(),
        "chunked_prefill_size": st.sampled_from([3, 64]),
        "max_prefill_tokens": st.sampled_from([16, 64]),
        "max_running_requests": st.sampled_from([2, 16]),
        "proposer": st.sampled_from([None, None, ScriptedProposer(vocab_size=VOCAB, mistake=wrong_every(3))]),
    }
)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=messages(),
    config=configs,
    chance=st.frozensets(st.integers(1, 30), max_size=4),
    pauses=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([PauseMode.IN_PLACE, PauseMode.RETRACT])), max_size=4),
    spare=st.integers(0, 20),
)
def test_only_poison_requests_fail_under_faults_and_pauses(requests, config, chance, pauses, spare):
    executor = LateExecutor if config["enable_overlap"] else EagerExecutor
    faults = Faults(chance)
    longest = max(len(each.input_ids) + each.sampling.max_tokens for each in requests)
    engine = make_engine(
        usable_pages=-(-longest // config["page_size"]) + spare,
        context_length=128,
        max_retractions=1000,
        executor=lambda model: executor(model, faults),
        **config,
    )
    for message in requests:
        engine.add(message)
    for steps, mode in pauses:
        engine.step(steps)
        engine.scheduler.pause(mode)
        engine.step()
        engine.scheduler.resume()
    engine.run()
    engine.assert_nothing_held()
    for message in requests:
        check(engine, message)


def check(engine: Engine, message) -> None:
    finish = engine.finish(message.rid)
    if POISON in message.input_ids:
        assert (finish.reason, finish.code) == (FinishReason.ERROR, "engine_error")
        assert engine.output(message.rid) == []
    else:
        assert finish.reason is FinishReason.LENGTH
        assert engine.output(message.rid) == expected_output(message)
