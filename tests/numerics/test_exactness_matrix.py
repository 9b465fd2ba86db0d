"""`tandem verify` on tiny random checkpoints: all paths between two families, some of those on which pages meet of the
others. `make test-long` runs all paths of both, and all on which pages meet of each."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.__main__ import main
from tandem_lab.verify import command
from tandem_lab.verify.compare import PathResult, compare
from tandem_lab.verify.paths import DraftPaths, make_paths, on_ranks
from tandem_lab.verify.reference import ReferenceOutput
from tandem_lab.verify.verification import Verification
from tandem_testing.exactness import (
    ADDED_PATHS,
    ALL_PATHS,
    CONTINUED,
    DISAGGREGATED,
    FETCHED,
    MEETING_HALVES,
    MEETING_PATHS,
    MOVED,
    REDUCED_PATHS,
    SHARED,
    UNEQUAL,
    little_host_memory,
    one_grammar_process,
    one_of_two,
    run_paths,
    run_paths_of,
)
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head

WHOLE = "all prompts and paths of a family: another family takes those that this one leaves out"


@pytest.fixture(
    scope="module",
    params=[
        *((name, place) for place, name in enumerate(ALL_PATHS)),
        *(pytest.param((name, None), marks=pytest.mark.long(WHOLE)) for name in ALL_PATHS),
    ],
    ids=[*ALL_PATHS, *(f"{name}, whole" for name in ALL_PATHS)],
)
def family(request) -> tuple[str, int | None]:
    """And its place among those that share all paths; None where it takes them all."""
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    model = write_tiny_checkpoint(family[0], tmp_path_factory.mktemp(family[0]))
    write_tiny_head(model, Path(f"{model}-eagle"))
    return model


@pytest.fixture(scope="module")
def verified(family, checkpoint) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    _, place = family
    some = little_host_memory() if place is None else one_of_two(place)
    with redirect_stdout(StringIO()) as out, some, one_grammar_process():
        status = main(["verify", "--model", str(checkpoint), "--json"])
    return status, json.loads(out.getvalue().splitlines()[-1])


def every_path() -> list[str]:
    """With a head and the model itself for drafts."""
    paths = make_paths(
        context_length=16, longest=8, num_prompts=1, quick=False, drafts=DraftPaths(itself="model", head="head")
    )
    return [path.name for path in [*paths, *on_ranks(paths, 2, quick=False)]]


def paths_of(place: int | None) -> list[str]:
    """That a family of this place takes."""
    if place is None:
        return every_path()
    with one_of_two(place):
        paths = command.make_paths(
            context_length=16, longest=8, num_prompts=1, quick=False, drafts=DraftPaths(itself="model", head="head")
        )
        return [path.name for path in [*paths, *command.on_ranks(paths, 2, quick=False)]]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a hundred engines, one after the other
def test_paths_match_transformers_tokens_and_logprobs(family, verified) -> None:
    status, report = verified
    assert [row["difference"] for row in report["paths"]] == [None] * len(report["paths"])
    assert status == 0
    assert report["equal"] is True
    assert [row["path"] for row in report["paths"]] == paths_of(family[1])


def test_two_families_take_every_path_between_them() -> None:
    taken = [paths_of(place) for place in range(len(ALL_PATHS))]
    assert sorted(name for names in taken for name in names) == sorted(every_path())
    assert abs(len(taken[0]) - len(taken[1])) <= 1
    assert {
        *(DISAGGREGATED, MOVED, FETCHED, CONTINUED, "resumed", "retracted (short of pages)", "page size 64"),
        *("EAGLE drafts, handed over", SHARED, *UNEQUAL, f"{MOVED}, 2 to 2 ranks"),
    } <= {*every_path()}


ALL_MEETING = "all paths on which pages meet of each family: every two families take them between them in `make test`"


@pytest.mark.parametrize(
    ("name", "paths"),
    [(name, MEETING_HALVES[place % 2]) for place, name in enumerate(REDUCED_PATHS)]
    + [pytest.param(name, MEETING_PATHS, marks=pytest.mark.long(ALL_MEETING)) for name in REDUCED_PATHS],
    ids=[*REDUCED_PATHS, *(f"{name}, whole" for name in REDUCED_PATHS)],
)
def test_other_families_take_the_paths_on_which_pages_meet(name, paths, tmp_path) -> None:
    results = run_paths(write_tiny_checkpoint(name, tmp_path), paths)
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in paths]


@pytest.mark.parametrize("name", ADDED_PATHS)
def test_family_is_exact_on_paths_that_it_extends(name, tmp_path) -> None:
    results = run_paths(write_tiny_checkpoint(name, tmp_path), ADDED_PATHS[name])
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in ADDED_PATHS[name]]


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_engines_on_ipv6_addresses_hand_over_exactly(transports, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    model = load(
        EngineConfig(model_path=str(write_tiny_checkpoint("qwen3", tmp_path)), dtype="float32"), progress=False
    )
    (result,) = run_paths_of(model, [DISAGGREGATED], every=5, host="::1")
    assert result.difference is None
    assert result.requests > 0


REFERENCE = ReferenceOutput(prompt=(1, 2), token_ids=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), ignore_eos=False)
REQUEST = GenerateRequest(rid="r", input_ids=(1, 2), sampling=SamplingParams(max_tokens=3))


def generation(tokens=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0)) -> Generation:
    return Generation(
        rid="r",
        resumed=0,
        token_ids=tokens,
        logprobs=tuple(TokenLogprob(logprob=value) for value in logprobs),
        finished=Finish(reason=FinishReason.LENGTH),
    )


@pytest.mark.parametrize(
    ("output", "difference"),
    [
        (generation(), None),
        (generation(tokens=(5, 9, 7)), "output 1 is 9, reference 6"),
        (generation(tokens=(5, 6), logprobs=(-1.0, -2.0)), "output 2 is end"),
        (generation(tokens=(5, 6, 7, 8)), "output 3 is 8, reference end"),
        (generation(logprobs=(-1.0, -2.0, -3.001)), "logprob -3.001000 at output 2"),
        (generation(logprobs=(-1.0, -2.0)), "2 logprobs for 3 tokens"),
    ],
)
def test_first_difference_is_found_and_named(output, difference) -> None:
    found = compare([REQUEST], [output], [REFERENCE]).difference
    assert (found is None) if difference is None else (difference in found)


def test_logprob_that_is_no_number_is_a_difference() -> None:
    """A comparison with it is never true, and so it was within any tolerance."""
    found = compare([REQUEST], [generation(logprobs=(-1.0, nan, -3.0))], [REFERENCE])
    assert (found.difference, found.max_logprob_difference) == ("r: logprob nan at output 1, reference -2.000000", 0.0)


def test_prompt_logprob_that_is_no_number_is_a_difference() -> None:
    request = msgspec.structs.replace(REQUEST, sampling=msgspec.structs.replace(REQUEST.sampling, prompt_logprobs=0))
    output = replace(generation(), prompt_logprobs=(None, TokenLogprob(logprob=nan)))
    found = compare([request], [output], [replace(REFERENCE, prompt_logprobs=(-1.0,))])
    assert found.difference == "r: logprob nan of prompt token 1, reference -1.000000"


def test_path_without_its_effect_is_not_exercised(checkpoint) -> None:
    config = EngineConfig(model_path=str(checkpoint), dtype="float32")
    reference = ReferenceOutput(prompt=(1, 2, 3), token_ids=(), logprobs=(), ignore_eos=True)
    verification = Verification(model=load(config, progress=False), references=[reference], max_tokens=1)
    path = next(p for p in make_paths(context_length=16, longest=8, num_prompts=1, quick=True) if p.expects_retraction)
    # One token leaves no decode step in which a request could be retracted.
    with torch.inference_mode():
        result = verification.run(path)
    assert result.not_exercised == "no request was retracted"


PLAIN_PATHS = make_paths(context_length=16, longest=8, num_prompts=1, quick=True)[:3]


@pytest.mark.parametrize(("second", "status"), [(None, 4), ("r: output 0 is 1, reference 2", 1)])
def test_paths_after_one_not_exercised_still_run(second, status, tmp_path, monkeypatch, capsys) -> None:
    row = PathResult(
        path="p",
        requests=1,
        tokens=1,
        cached_tokens=0,
        retractions=0,
        accepted_drafts=0,
        max_logprob_difference=0.0,
        seconds=0.1,
        difference=None,
    )
    rows = [msgspec.structs.replace(row, not_exercised="no draft was accepted")]
    rows += [msgspec.structs.replace(row, difference=second), row]
    monkeypatch.setattr(Verification, "run", lambda *_: rows.pop(0))
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr("tandem_lab.verify.command.make_paths", lambda **_: PLAIN_PATHS)
    monkeypatch.setattr("tandem_lab.verify.command.on_ranks", lambda *_, **__: [])
    assert main(["verify", "--model", str(checkpoint), "--quick"]) == status
    shown = capsys.readouterr().out
    assert "not exercised: no draft was accepted" in shown
    assert (len(rows), "NOT EXERCISED" in shown) == ((0, True) if second is None else (1, False))


@pytest.mark.timeout(900)
def test_verify_report_names_family_impl_and_token_counts(verified) -> None:
    _, report = verified
    assert report["family"] in ("qwen3", "gemma2")
    assert report["impl"] == "tandem"
    assert all(row["tokens"] > 0 for row in report["paths"])


@pytest.mark.parametrize(
    ("rival", "rounded_kv", "difference"),
    [
        (-2.03, True, None),
        (-2.2, True, "r (prompt of 2): output 1 is 9, reference 6"),
        (-2.03, False, "r (prompt of 2): output 1 is 9, reference 6"),
    ],
)
def test_near_tied_tokens_are_equal_with_rounded_kv(rival, rounded_kv, difference) -> None:
    """KV of float8 rounds what differs in its last bit to one side or the other; what follows has another history."""
    output = generation(tokens=(5, 9, 8))
    tied = TokenLogprob(logprob=-2.0, top=((9, -2.0), (6, rival)))
    output = replace(output, logprobs=(output.logprobs[0], tied, output.logprobs[2]))
    found = compare([REQUEST], [output], [REFERENCE], rounded_kv=rounded_kv)
    assert found.difference == difference
