"""LoRA adapters of library callers."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_engine import LLM, AsyncLLM, LoRARequest, SamplingParams
from tandem_engine.base.errors import CheckpointError, ConfigError, InvalidRequestError
from tandem_engine.config.flags.adapters import add_adapter_flags
from tandem_engine.library.adapters import adapter_config
from tandem_engine.model.cpu.step import SmallStep
from tandem_testing.adapters import read_files, write_adapter, write_files

MODEL = Path(__file__).resolve().parents[4] / "models" / "tandem-mini"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "Once upon a time there was a fox that lived near a river and had two children who"
OPTIONS = {"progress": False, "dtype": "float32", "num_pages": 200, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "one", MODEL, seed=1)
    write_adapter(folder / "two", MODEL, seed=2, modules=["v_proj"], rank=1)
    write_adapter(folder / "copy", MODEL, seed=1)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(MODEL, adapters={name: folder / name for name in ("one", "two", "copy")}, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompt: str, *names: str | None) -> list[tuple[int, ...]]:
    requests = [None if name is None else LoRARequest(name) for name in names]
    outputs = llm.generate([prompt] * len(names), GREEDY, lora_request=requests, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def cached(llm: LLM, name: str | None) -> int:
    request = None if name is None else LoRARequest(name)
    [output] = llm.generate(PROMPT, GREEDY, lora_request=request, use_tqdm=False)
    return output.metrics.cached_tokens


def test_each_prompt_has_its_adapter(llm: LLM) -> None:
    base, one, two, again = tokens(llm, "The fox", None, "one", "two", "one")
    assert len({base, one, two}) == 3
    assert again == one
    assert tokens(llm, "The fox", "two", None) == [two, base]


def test_model_alone_answers_as_without_adapters(llm: LLM) -> None:
    mixed = tokens(llm, "A river", None, "one", "two")[0]
    with LLM(MODEL, **OPTIONS) as plain:
        assert tokens(plain, "A river", None) == [mixed]


def test_prefixes_are_shared_by_content_alone(llm: LLM) -> None:
    llm.reset_prefix_cache()
    assert [cached(llm, name) for name in (None, "one", "two")] == [0, 0, 0]
    whole = cached(llm, None)
    assert whole > 0
    assert [cached(llm, name) for name in ("one", "two", "copy")] == [whole] * 3


def test_replaced_adapter_answers_as_its_new_content(folder: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "sql", *read_files(folder / "one"))
    with LLM(MODEL, adapters={"sql": tmp_path / "sql"}, **OPTIONS) as llm:
        old = tokens(llm, PROMPT, "sql")
        write_files(tmp_path / "sql", *read_files(folder / "two"))
        assert tokens(llm, PROMPT, "sql") == old
    with LLM(MODEL, adapters={"sql": tmp_path / "sql", "two": folder / "two"}, **OPTIONS) as llm:
        new, two = tokens(llm, PROMPT, "sql", "two")
        assert new == two != old[0]


def test_adapters_change_embeddings_and_chats(llm: LLM) -> None:
    vectors = llm.embed([PROMPT] * 2, lora_request=[None, LoRARequest("one")], use_tqdm=False)
    assert vectors[0].outputs.embedding != vectors[1].outputs.embedding
    chat = [{"role": "user", "content": "Tell me a story."}]
    answers = [llm.chat(chat, GREEDY, lora_request=each, use_tqdm=False)[0] for each in (None, LoRARequest("one"))]
    assert answers[0].outputs[0].token_ids != answers[1].outputs[0].token_ids


def test_one_adapter_for_all_prompts(llm: LLM) -> None:
    outputs = llm.generate(["The fox", "A river"], GREEDY, lora_request=LoRARequest("one"), use_tqdm=False)
    assert [tuple(each.outputs[0].token_ids) for each in outputs] == [
        *tokens(llm, "The fox", "one"),
        *tokens(llm, "A river", "one"),
    ]


def test_async_callers_name_an_adapter(llm: LLM, folder: Path) -> None:
    async def last() -> tuple[int, ...]:
        async with AsyncLLM(MODEL, adapters={"one": folder / "one"}, **OPTIONS) as other:
            async for output in other.generate("The fox", GREEDY, lora_request=LoRARequest("one", 1)):
                final = output
            return tuple(final.outputs[0].token_ids)

    assert asyncio.run(last()) == tokens(llm, "The fox", "one")[0]


def test_drafts_of_a_head_keep_the_outputs(llm: LLM, folder: Path) -> None:
    head = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": f"{MODEL}-eagle"}
    with LLM(MODEL, adapters={"one": folder / "one"}, **OPTIONS, **head) as drafting:
        assert tokens(drafting, PROMPT, "one", None) == tokens(llm, PROMPT, "one", None)


def test_adapters_stay_when_weights_are_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted: list[bool] = []
    forward = SmallStep.forward
    monkeypatch.setattr(
        SmallStep, "forward", lambda step, *given: adapted.append(step.adapters is not None) or forward(step, *given)
    )
    with LLM(MODEL, adapters={"one": folder / "one"}, **OPTIONS) as llm:
        before = tokens(llm, PROMPT, "one", None)
        assert any(adapted)
        llm.reload_weights()
        adapted.clear()
        assert tokens(llm, PROMPT, "one", None) == before
        assert any(adapted)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LoRARequest("sql"), r"adapter 'sql' is not loaded \(loaded: one, two, copy\)"),
        (LoRARequest("one", 1, "/elsewhere"), "adapter 'one' was loaded from .*, not from /elsewhere"),
        ([None], "1 lora_request for 2 prompts"),
    ],
)
def test_adapter_that_is_not_loaded_is_refused(llm: LLM, request_: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["a", "b"], GREEDY, lora_request=request_, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_lora_rank": 3}, CheckpointError, "adapter 'one': .* has rank 4; the limit is 3"),
        ({"max_lora_rank": 0}, ConfigError, "max_lora_rank must be at least 1, got 0"),
        ({"max_lora_rank": "8"}, ConfigError, "max_lora_rank takes a number, got '8'"),
        ({"enable_lora": True}, ConfigError, "enable_lora is not needed: leave it out"),
    ],
)
def test_options_that_cannot_be_are_refused(folder: Path, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(MODEL, adapters={"one": folder / "one"}, **OPTIONS, **options)


def test_every_flag_of_adapters_is_read_or_refused() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_adapter_flags(parser)
    for flag in {action.dest for action in parser._actions} - {"max_lora_rank"}:
        with pytest.raises(ConfigError, match=f"{flag} is .*: leave it out"):
            adapter_config(None, {flag: "x"})


@pytest.mark.parametrize("name", ["", "a/b", "nul\0", "x" * 129])
def test_llm_refuses_malformed_adapter_names(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="adapters: a name has 1 to 128 bytes of printable characters"):
        LLM(MODEL, adapters={name: folder / "one"}, **OPTIONS)
