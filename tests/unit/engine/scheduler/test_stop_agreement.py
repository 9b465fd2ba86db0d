"""The engine, which sees tokens, and the gateway, which shows text, end an output at the same token [one-cut]."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.stop import ModelFacts, StopRule
from tandem_engine.tokenizer.output_text import OutputText
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.tokenizer_builders import EOS, write_tokenizer

MAX_TOKENS = 30


@cache
def tokenizer() -> TextTokenizer:
    with TemporaryDirectory() as folder:
        return TextTokenizer.load(write_tokenizer(Path(folder) / "tokenizer"))


def engine_end(ids: Sequence[int], sampling: SamplingParams, runs: Sequence[int]) -> tuple[int, bool]:
    """Tokens kept, and whether a stop string ended them; `runs` is how many tokens come at a time."""
    rule = StopRule(
        model=ModelFacts(vocab_size=tokenizer().vocab_size, eos_token_ids=frozenset({EOS}), context_length=10_000),
        decode_text=lambda window: tokenizer().decode(window, skip_special_tokens=True),
    )
    outputs: list[int] = []
    for length in [*runs, *[1] * len(ids)]:
        run = ids[len(outputs) : len(outputs) + length]
        cut = rule.cut_at_stop(sampling, prompt_len=1, outputs=outputs, run=run)
        outputs += run[: cut.keep]
        if cut.finish is not None:
            return len(outputs), cut.finish.reason is FinishReason.STOP
        if len(outputs) == len(ids):
            break
    return len(outputs), False


def gateway_end(ids: Sequence[int], sampling: SamplingParams) -> tuple[int, bool]:
    """The same, as the text says it."""
    text = OutputText(tokenizer().vocabulary, sampling)
    for count, token in enumerate(ids[: sampling.max_tokens], 1):
        if text.push(token).matched is not None:
            return count, True
    return min(len(ids), sampling.max_tokens), False


words = st.sampled_from(["the", " quick", " fox", "aab", "ab", "é", "你", "🎉", " ", "\n", "x"])
texts = st.lists(words, min_size=1, max_size=8).map("".join)


@settings(deadline=None, max_examples=200)
@given(
    text=texts,
    stop=st.lists(texts.map(lambda text: text[:4]), min_size=1, max_size=3, unique=True),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, MAX_TOKENS),
    runs=st.lists(st.integers(1, 6), max_size=10),
)
@example(text="aaab", stop=["aab"], min_tokens=0, max_tokens=MAX_TOKENS, runs=[4])
@example(text="a🎉b", stop=["🎉"], min_tokens=0, max_tokens=MAX_TOKENS, runs=[])
def test_engine_and_gateway_end_at_the_same_token(text, stop, min_tokens, max_tokens, runs):
    ids = tokenizer().encode(text, add_special_tokens=False)
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop=tuple(stop))
    assert engine_end(ids, sampling, runs) == gateway_end(ids, sampling)


@pytest.mark.parametrize("keep_stop", [False, True])
def test_text_ends_with_the_stop_string_or_right_before_it(keep_stop):
    ids = tokenizer().encode("the quick fox", add_special_tokens=False)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop=("ick",))
    text = OutputText(tokenizer().vocabulary, sampling, keep_stop=keep_stop)
    cuts = [text.push(token) for token in ids[: gateway_end(ids, sampling)[0]]]
    assert cuts[-1].matched == "ick"
    assert "".join(cut.text for cut in cuts) == ("the quick" if keep_stop else "the qu")
