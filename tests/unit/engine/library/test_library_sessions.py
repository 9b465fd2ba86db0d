"""Conversations of the library on the bundled model: only new turns are given, the output is that of the whole."""

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_engine import LLM, AsyncLLM, SamplingParams
from tandem_engine.base.errors import InvalidRequestError, SessionError, SessionLostError
from tandem_testing.unhurried import unhurried

MODEL = Path(__file__).resolve().parents[4] / "models" / "tandem-mini"
OPTIONS = {"progress": False, "dtype": "float32", "num_pages": 300, "threads": 1, "context_length": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
TURNS = ("Once upon a time there was a fox", " who met", " and said")


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, max_sessions=4, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompt, params: SamplingParams = GREEDY, session=None) -> tuple[int, ...]:
    [output] = llm.generate(prompt, params, session=session, use_tqdm=False)
    return output.outputs[0].token_ids


def conversation(llm: LLM, turns=TURNS) -> list[tuple[int, ...]]:
    """What each turn gives when the whole history is sent along."""
    history: list[int] = []
    outputs = []
    for number, text in enumerate(turns):
        history += llm.get_tokenizer().encode(text, add_special_tokens=number == 0)
        outputs.append(tokens(llm, history))
        history += outputs[-1]
    return outputs


def test_session_turns_equal_output_of_whole_history(llm):
    with llm.open_session() as session:
        given = [tokens(llm, text, session=session) for text in TURNS]
    assert given == conversation(llm)
    assert session.turns == 3


def test_turn_without_output_adds_its_prompt_alone(llm):
    nothing = replace(GREEDY, max_tokens=0)
    whole = list(range(60, 120))
    with llm.open_session() as session:
        assert tokens(llm, whole[:25], nothing, session=session) == ()
        assert tokens(llm, whole[25:40], nothing, session=session) == ()
        assert session.tokens == 40
        assert tokens(llm, whole[40:], session=session) == tokens(llm, whole)


def test_only_the_new_turn_is_computed_and_shown(llm):
    llm.reset_prefix_cache()
    session = llm.open_session()
    first = tokens(llm, list(range(60, 100)), session=session)
    [output] = llm.generate([[5, 6, 7]], replace(GREEDY, prompt_logprobs=0), session=session, use_tqdm=False)
    assert output.prompt_token_ids == (5, 6, 7)
    assert output.metrics.cached_tokens == 48
    assert session.tokens == 40 + 10 + 3 + 10
    history = [*range(60, 100), *first, 5, 6, 7]
    [whole] = llm.generate([history], replace(GREEDY, prompt_logprobs=0), use_tqdm=False)
    for ours, theirs in zip(output.prompt_logprobs, whole.prompt_logprobs[-3:], strict=True):
        [mine], [other] = ours.values(), theirs.values()
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    session.close()


def test_concurrent_sessions_match_separate_conversations(llm):
    openings = [["A fox", " ran"], ["A river", " froze"], ["The moon", " rose"]]
    sessions = [llm.open_session() for _ in openings]
    by_turn = [
        [output.outputs[0].token_ids for output in llm.generate(turn, GREEDY, session=sessions, use_tqdm=False)]
        for turn in zip(*openings, strict=True)
    ]
    assert [[*each] for each in zip(*by_turn, strict=True)] == [conversation(llm, turns) for turns in openings]
    for session in sessions:
        session.close()


def test_turn_of_closed_session_raises_session_lost_with_fix(llm):
    session = llm.open_session("mine")
    tokens(llm, "The fox", session=session)
    session.close()
    session.close()
    with pytest.raises(SessionLostError, match="session 'mine' is not kept here.*send the whole conversation"):
        tokens(llm, " ran", session=session)


def test_least_recently_used_session_is_evicted(llm):
    sessions = [llm.open_session() for _ in range(5)]
    for session in sessions:
        tokens(llm, "The fox", session=session)
    with pytest.raises(SessionLostError):
        tokens(llm, " ran", session=sessions[0])
    assert tokens(llm, " ran", session=sessions[4])
    for session in sessions:
        session.close()


@pytest.mark.parametrize(
    ("params", "prompts", "count", "text"),
    [
        (replace(GREEDY, n=2), ["a"], 1, "n and best_of must be 1, got 2"),
        (GREEDY, ["a", "b"], 1, "1 sessions for 2 prompts"),
        (replace(GREEDY, max_tokens=5000), ["a"], 1, "prompt 0: max_tokens is 5000"),
    ],
)
def test_options_unsupported_in_sessions_are_rejected_at_once(llm, params, prompts, count, text):
    sessions = [llm.open_session() for _ in range(count)]
    with pytest.raises(InvalidRequestError, match=text):
        llm.generate(prompts, params, session=sessions, use_tqdm=False)


def test_two_prompts_of_one_call_cannot_continue_one_session(llm):
    session = llm.open_session()
    with pytest.raises(InvalidRequestError, match="two prompts continue one session"):
        llm.generate(["a", "b"], GREEDY, session=[session, session], use_tqdm=False)


def test_session_default_max_tokens_is_remaining_context(llm):
    session = llm.open_session()
    tokens(llm, [7] * 480, session=session)
    assert len(tokens(llm, [8] * 4, replace(GREEDY, max_tokens=None), session=session)) == 512 - 480 - 10 - 4
    session.close()


async def last(generator):
    async for output in generator:
        final = output
    return final.outputs[0].token_ids


async def test_async_llm_continues_conversations(llm):
    async with AsyncLLM(MODEL, **OPTIONS) as async_llm:
        with async_llm.open_session() as session:
            given = [await last(async_llm.generate(text, GREEDY, session=session)) for text in TURNS]
            assert given == conversation(llm)
        with pytest.raises(SessionLostError):
            await last(async_llm.generate("more", GREEDY, session=session))

        session = async_llm.open_session()
        first = await last(async_llm.generate("The fox", GREEDY, session=session))
        long = replace(GREEDY, max_tokens=300)
        async with unhurried(async_llm), aclosing(async_llm.generate(" ran", long, session=session)) as left:
            async for _ in left:
                break
        tokenizer = async_llm.get_tokenizer()
        whole = [*tokenizer.encode("The fox"), *first, *tokenizer.encode(" hid", add_special_tokens=False)]
        assert await last(async_llm.generate(" hid", GREEDY, session=session)) == tokens(llm, whole)

        async with unhurried(async_llm):
            running = async_llm.generate(" and", long, request_id="running", session=session)
            await anext(running)
            with pytest.raises(SessionError, match="computing another turn"):
                await last(async_llm.generate(" then", GREEDY, session=session))
            await running.aclose()
