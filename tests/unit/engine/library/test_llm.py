"""`LLM` on the bundled model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import BusyError, CheckpointError, ConfigError, InvalidRequestError
from tandem_engine.executor import memory_profile
from tandem_engine.executor.memory_profile import HostMeter

MODEL = Path(__file__).resolve().parents[4] / "models" / "tandem-mini"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, progress=False, dtype="float32", num_pages=300, threads=1, max_queued_requests=8) as llm:
        yield llm


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_progress_function_gets_each_phase_of_the_load(capfd):
    seen = []
    with LLM(MODEL, progress=seen.append, dtype="float32", num_pages=40, threads=1) as llm:
        loaded = len(seen)
        llm.generate("The fox", GREEDY, use_tqdm=False)
    assert seen[0].phase == "weights"
    assert "memory" in {report.phase for report in seen}
    assert [report.share for report in seen if report.unit == "bytes" and report.phase == "weights"][-1] == 1.0
    assert len(seen) == loaded
    assert "loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize("progress", ["yes", 1, None])
def test_progress_of_another_type_is_refused_by_name(progress):
    with pytest.raises(ConfigError, match="progress must be True, False or a function, got"):
        LLM(MODEL, progress=progress)


def test_outputs_follow_prompt_order_and_carry_the_prompt(llm):
    prompts = ["Once upon a time", "The fox", "A river"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished and len(output.outputs) == 1 for output in outputs)
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        [choice] = output.outputs
        assert tuple(tokenizer.encode(output.prompt)) == output.prompt_token_ids
        assert choice.text == tokenizer.decode(choice.token_ids)
        assert choice.finish_reason in ("stop", "length")
        assert output.metrics.prefill_s > 0


def test_one_prompt_text_or_ids_gives_one_output(llm):
    ids = llm.get_tokenizer().encode("The fox")
    by_text = llm.generate("The fox", GREEDY, use_tqdm=False)
    by_ids = llm.generate(ids, GREEDY, use_tqdm=False)
    listed = llm.generate([ids, "The fox"], GREEDY, use_tqdm=False)
    assert texts(by_text) == texts(by_ids)
    assert texts(listed) == texts(by_text) * 2
    assert by_ids[0].prompt is None


@pytest.mark.parametrize("n", [1, 3])
def test_zero_tokens_compute_and_cache_the_prompt(llm, n):
    llm.reset_prefix_cache()
    prompt = list(range(60, 124))
    [fed] = llm.generate([prompt], SamplingParams(max_tokens=0, n=n), use_tqdm=False)
    assert [(each.text, each.token_ids, each.finish_reason) for each in fed.outputs] == [("", (), "length")] * n
    assert fed.metrics.cached_tokens == 0
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.metrics.cached_tokens >= 48


def test_min_tokens_above_zero_tokens_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="min_tokens must be 0"):
        llm.generate("The fox", SamplingParams(max_tokens=0, min_tokens=2), use_tqdm=False)


def test_defaults_are_those_of_vllm(llm):
    [output] = llm.generate("Once upon a time", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_each_prompt_may_have_parameters_of_its_own(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 7)]
    outputs = llm.generate(["The fox", "The fox"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 7]


def test_prompts_beyond_queue_limit_are_fed_incrementally(llm):
    prompts = [[5 + i, 6, 7] for i in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert {len(output.outputs[0].token_ids) for output in outputs} == {3}


def test_choices_have_seeds_that_follow_one_another(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    [output] = llm.generate("The fox", params, use_tqdm=False)
    alone = [
        llm.generate("The fox", replace(params, n=1, seed=5 + i), use_tqdm=False)[0].outputs[0].token_ids
        for i in range(3)
    ]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in output.outputs] == alone


def test_best_of_keeps_the_likeliest(llm):
    params = SamplingParams(n=4, seed=5, max_tokens=8, ignore_eos=True, logprobs=0)
    [all_four] = llm.generate("The fox", params, use_tqdm=False)
    [best] = llm.generate("The fox", replace(params, n=2, best_of=4, logprobs=None), use_tqdm=False)
    ranked = sorted(all_four.outputs, key=lambda choice: choice.cumulative_logprob, reverse=True)
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None, "they were computed for the choice alone"


def test_stop_string_is_cut_from_text_and_its_token_kept(llm):
    [free] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    params = replace(GREEDY, stop=stop)
    [cut] = llm.generate("Once upon a time", params, use_tqdm=False)
    [kept] = llm.generate("Once upon a time", replace(params, include_stop_str_in_output=True), use_tqdm=False)
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert kept.outputs[0].text == text[: text.index(stop) + 3]
    assert stop in llm.get_tokenizer().decode(cut.outputs[0].token_ids)


def test_stop_token_counts_and_does_not_show(llm):
    [free] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    stop = free.outputs[0].token_ids[4]
    [cut] = llm.generate("Once upon a time", replace(GREEDY, stop_token_ids=[stop]), use_tqdm=False)
    [choice] = cut.outputs
    assert (choice.stop_reason, choice.token_ids[-1]) == (stop, stop)
    assert choice.text == llm.get_tokenizer().decode(choice.token_ids[:-1])


def test_logprobs_name_the_sampled_token_and_the_likeliest(llm):
    [output] = llm.generate("The fox", SamplingParams(seed=3, max_tokens=6, logprobs=2), use_tqdm=False)
    [choice] = output.outputs
    assert len(choice.logprobs) == len(choice.token_ids)
    assert choice.cumulative_logprob == pytest.approx(
        sum(scores[token].logprob for token, scores in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    for token, scores in zip(choice.token_ids, choice.logprobs, strict=True):
        assert token in scores
        assert sorted(score.rank for score in scores.values() if score.rank) == [1, 2]
        assert scores[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)


def test_prompt_logprobs_match_positions_of_prompt_tokens(llm):
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, n=2)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    first, *rest = output.prompt_logprobs
    assert first is None
    assert len(rest) == len(output.prompt_token_ids) - 1
    for token, scores in zip(output.prompt_token_ids[1:], rest, strict=True):
        assert scores[token].logprob <= max(score.logprob for score in scores.values())
        assert {score.rank for score in scores.values()} >= {1}


@pytest.mark.parametrize(
    ("params", "holds"),
    [
        (SamplingParams(logit_bias={77: 100.0}, max_tokens=3), lambda ids: set(ids) == {77}),
        (SamplingParams(allowed_token_ids=[77, 78], max_tokens=6), lambda ids: set(ids) <= {77, 78}),
        (SamplingParams(repetition_penalty=2.0, temperature=0.0, max_tokens=8), lambda ids: len(set(ids)) >= 6),
        (SamplingParams(min_tokens=30, max_tokens=30), lambda ids: len(ids) == 30),
    ],
)
def test_logit_edits_are_applied(llm, params, holds):
    assert holds(llm.generate("The fox", params, use_tqdm=False)[0].outputs[0].token_ids)


def test_bad_word_is_absent_from_the_output(llm):
    [free] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    word = next(word for word in free.outputs[0].text.split() if word.isalpha())
    [clean] = llm.generate("Once upon a time", replace(GREEDY, bad_words=[word]), use_tqdm=False)
    assert word in free.outputs[0].text.split()
    assert word not in clean.outputs[0].text.split()


def test_named_tokens_are_scored_instead_of_the_likeliest(llm):
    params = SamplingParams(seed=3, max_tokens=4, logprobs=1, logprob_token_ids=[77, 5])
    [output] = llm.generate("The fox", params, use_tqdm=False)
    [free] = llm.generate("The fox", replace(params, logprob_token_ids=[], logprobs=20), use_tqdm=False)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids
    for token, scores, likeliest in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, free.outputs[0].logprobs, strict=True
    ):
        assert {*scores} == {token, 77, 5}
        assert (scores[77].rank, scores[token].logprob) == (None, likeliest[token].logprob)
        for named in {77, 5} & {*likeliest}:
            assert scores[named].logprob == likeliest[named].logprob


@pytest.mark.parametrize(("prompt", "budget"), [("Why?<think>\n", 5), ("Why?<think>", 0)])
def test_spent_budget_ends_the_reasoning_and_the_answer_follows(llm, prompt, budget):
    encode = llm.get_tokenizer().encode
    [free] = llm.generate(prompt, GREEDY, use_tqdm=False)
    [bounded] = llm.generate(prompt, replace(GREEDY, thinking_token_budget=budget), use_tqdm=False)
    reasoning = (*free.outputs[0].token_ids[:budget], *encode("</think>", add_special_tokens=False))
    [rest] = llm.generate([[*free.prompt_token_ids, *reasoning]], GREEDY, use_tqdm=False)
    assert bounded.outputs[0].token_ids == (reasoning + rest.outputs[0].token_ids)[:12]


def test_thinking_budget_without_reasoning_changes_nothing(llm):
    [free] = llm.generate("The fox", GREEDY, use_tqdm=False)
    [bounded] = llm.generate("The fox", replace(GREEDY, thinking_token_budget=2), use_tqdm=False)
    assert bounded.outputs[0].token_ids == free.outputs[0].token_ids


def test_conversation_goes_through_the_chat_template(llm):
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == tuple(llm.get_tokenizer().encode_chat(messages))
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert texts(two) == texts([output]) * 2


def test_prompt_dicts_of_vllm_equal_plain_prompts(llm):
    [plain] = llm.generate("The fox", GREEDY, use_tqdm=False)
    ids = list(plain.prompt_token_ids)
    prompts = [
        {"prompt": "The fox", "multi_modal_data": None},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "prompt": "The fox", "cache_salt": "a"},
    ]
    assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == texts([plain]) * 3
    for prompt in prompts:
        assert texts(llm.generate(prompt, GREEDY, use_tqdm=False)) == texts([plain])


def test_prompts_with_other_cache_salt_share_no_prefix(llm):
    ids = [*range(300, 364)]
    [first] = llm.generate({"prompt_token_ids": ids, "cache_salt": "tenant-a"}, GREEDY, use_tqdm=False)
    [other] = llm.generate({"prompt_token_ids": ids, "cache_salt": "tenant-b"}, GREEDY, use_tqdm=False)
    [same] = llm.generate({"prompt_token_ids": ids, "cache_salt": "tenant-a"}, GREEDY, use_tqdm=False)
    assert (other.metrics.cached_tokens, first.metrics.cached_tokens) == (0, 0)
    assert same.metrics.cached_tokens > 0


def test_no_max_tokens_means_the_rest_of_the_context(llm):
    long = [7] * 4090
    [output] = llm.generate([long], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["good", ""], None, "prompt 1: the prompt is empty"),
        (["good", [1, "x"]], None, "prompt 1: a prompt must be a string, a list of token ids, or a dict"),
        (["good", 5], None, "prompt 1: a prompt must be"),
        ({}, None, "a prompt that is a dict needs `prompt`"),
        ([{"prompt_token_ids": "x"}], None, "prompt 0: a prompt that is a dict needs"),
        ([{"prompt": 5}], None, "prompt 0: prompt and cache_salt of a prompt must be strings"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, None, "not supported here: multi_modal_data"),
        ({"prompt_embeds": [0.5]}, None, "not supported here: prompt_embeds"),
        ([[1, 10**9]], None, "prompt 0: input_ids has token id 1000000000"),
        ([[1] * 5000], None, "prompt 0: the prompt has 5000 tokens"),
        ("good", SamplingParams(temperature=-1.0), "temperature must be between"),
        ("good", SamplingParams(temperature=math.nan), "temperature must be between"),
        ("good", SamplingParams(top_k=-2), "top_k must be between"),
        ("good", SamplingParams(max_tokens=5000), "max_tokens is 5000"),
        ("good", SamplingParams(n=0), "n must be between 1 and 128, got 0"),
        ("good", SamplingParams(n=3, best_of=2), "best_of must be between n=3 and 128, got 2"),
        ("good", SamplingParams(bad_words=["  "]), "bad_words"),
        ("good", SamplingParams(logprob_token_ids=[5]), "logprob_token_ids"),
        ("good", SamplingParams(thinking_token_budget=-1), "thinking_token_budget must be between"),
        ("good", SamplingParams(thinking_token_budget=1, reasoning_markers=("", "x")), "the begin marker must have"),
        (["a", "b"], [GREEDY], "1 sampling_params for 2 prompts"),
    ],
)
def test_unservable_prompt_is_rejected_before_generation(llm, prompts, params, text):
    before = llm.stats().output_tokens_total
    with pytest.raises(InvalidRequestError, match=text):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().output_tokens_total == before


def test_choices_beyond_queue_limit_raise_config_error(llm):
    with pytest.raises(ConfigError, match=r"20 outputs, more than max_queued_requests=8"):
        llm.generate("The fox", SamplingParams(n=20), use_tqdm=False)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_interrupt_leaves_no_request_for_the_next_call(llm, monkeypatch):
    expected = texts(llm.generate("The fox", GREEDY, use_tqdm=False))
    step, calls = llm._engine.step, []

    def interrupted() -> bool:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A river", "The fox"], replace(GREEDY, max_tokens=100), use_tqdm=False)
    assert llm._engine.scheduler.idle
    assert texts(llm.generate("The fox", GREEDY, use_tqdm=False)) == expected


def test_repeated_prompt_is_cached_until_the_cache_is_reset(llm):
    prompt = [list(range(10, 60))]
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].metrics.cached_tokens == 48
    assert llm.reset_prefix_cache() > 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].metrics.cached_tokens == 0


def test_same_weights_again_give_the_same_text(llm):
    before = texts(llm.generate("The fox", GREEDY, use_tqdm=False))
    llm.reload_weights()
    assert texts(llm.generate("The fox", GREEDY, use_tqdm=False)) == before


def test_steps_between_start_and_stop_are_traced(llm, tmp_path):
    path = llm.start_profile(tmp_path)
    llm.generate("The fox", replace(GREEDY, max_tokens=2), use_tqdm=False)
    assert llm.stop_profile() == path
    assert path.stat().st_size > 1000
    with pytest.raises(BusyError):
        llm.stop_profile()


def test_progress_is_shown_unless_it_is_not_wanted(llm, capsys):
    llm.generate(["The fox", "A river"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["The fox"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_closing_gives_the_caller_its_threads_back():
    before = torch.get_num_threads()
    with LLM(MODEL, progress=False, num_pages=50, threads=1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_sise": 16}, "did you mean page_size"),
        ({"page_size": 0}, "--page-size"),
        ({"page_size": True}, "page_size takes a value"),
        ({"disable_radix_cache": 1}, "disable_radix_cache is a switch"),
        ({"dtype": "int3"}, "--dtype"),
        ({"num_pages": 10, "kv_cache_gib": 1.0}, "both size the KV pool"),
        ({"context_length": 999_999}, "--context-length 999999"),
    ],
)
def test_option_that_cannot_work_names_itself(options, text):
    with pytest.raises(ConfigError, match=text):
        LLM(MODEL, progress=False, **options)


def test_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(tmp_path, progress=False)


class Machine(HostMeter):
    """One on which this process has a quarter of the memory, or less, whatever ran in it before."""

    def total(self) -> int:
        return 4 * self.used() + (8 << 30)

    def available(self) -> int:
        return self.total() - self.used()


def test_share_of_memory_sizes_the_pool_by_a_profile_run(monkeypatch):
    monkeypatch.setattr(memory_profile, "meter_for", lambda _: Machine())
    with LLM(MODEL, progress=False, mem_fraction_static=0.3, max_prefill_tokens=64, threads=1) as llm:
        assert llm.stats().total_pages > 100
    with pytest.raises(ConfigError, match=r"raise --mem-fraction-static to 0\.\d+"):
        LLM(MODEL, progress=False, mem_fraction_static=0.0001, max_prefill_tokens=64, threads=1)
