"""The hint after a flag that does not exist: the right one, or none."""

import argparse
import re
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import engine_flags
from tandem_engine.config.flags.other_engines import EQUIVALENT, NO_EQUIVALENT, NOT_NEEDED, NOT_SUPPORTED
from tandem_engine.library.llm import config_from_options
from tandem_services.cli.main import build_parser, main
from tandem_services.cli.parsing.hints import about_flag

NAMES = Path(__file__).with_name("flags_of_other_engines.txt")
"""Every flag of both, from their sources."""

OLDER = {"--guided-decoding-backend", "--speculative-model", "--num-speculative-tokens", "--rope-scaling"}
"""Of older releases of vLLM."""

COMMANDS = ("up", "worker", "gateway", "router")


@pytest.fixture(scope="module")
def parsers():
    action = next(each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return action.choices


@pytest.fixture(scope="module")
def theirs() -> frozenset[str]:
    lines = NAMES.read_text().splitlines()
    return frozenset(word for line in lines if not line.startswith("#") for word in line.split())


def hint(parser, flag: str) -> str:
    return about_flag(flag, [*parser._option_string_actions], serves=parser.serves)


def test_listed_flags_are_flags_of_another_engine_alone(parsers, theirs):
    positive = {flag.replace("--no-", "--", 1) for flag in EQUIVALENT}
    assert positive | NOT_NEEDED.keys() | NOT_SUPPORTED.keys() | NO_EQUIVALENT <= theirs | OLDER
    groups = (EQUIVALENT.keys(), NOT_NEEDED.keys(), NOT_SUPPORTED.keys(), NO_EQUIVALENT)
    assert sum(map(len, groups)) == len(frozenset().union(*groups))
    for command in ("up", "worker"):
        assert not frozenset().union(*groups) & parsers[command]._option_string_actions.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_hint_about_another_engine_names_flags_of_the_command(command, parsers, theirs):
    parser = parsers[command]
    known = parser._option_string_actions
    for flag in sorted((theirs | EQUIVALENT.keys() | OLDER) - known.keys()):
        found = hint(parser, flag)
        assert "did you mean" not in found, flag
        named = set(re.findall(r"--[a-z][a-z0-9-]*", found)) - {flag}
        assert all(name in known and known[name].help != argparse.SUPPRESS for name in named), found


@pytest.mark.parametrize("command", COMMANDS)
def test_flag_of_an_engine_is_no_misspelt_flag_of_a_gateway(command, parsers):
    parser = parsers[command]
    for flag in engine_flags() - parser._option_string_actions.keys():
        assert hint(parser, flag) == ""


@pytest.mark.parametrize(
    ("command", "flag", "expected"),
    [
        (
            "up",
            "--max-total-tokens",
            "is --num-pages here, in pages of --page-size tokens",
        ),
        ("up", "--enforce-eager", "--enforce-eager of vLLM or SGLang is --disable-cuda-graph here"),
        ("up", "--cpu-offload-gb", "--cpu-offload-gb of vLLM or SGLang is not supported here: weights in host memory"),
        ("up", "--lora-dtype", "--lora-dtype of vLLM or SGLang is not supported here: this setting of LoRA adapters"),
        ("up", "--lora-paths", "--lora-paths of vLLM or SGLang is --lora-modules here"),
        ("gateway", "--max-lora-rank", ""),
        ("up", "--data-parallel-size", "is a number of workers here: --prefill, --decode or --both"),
        ("up", "--kv-transfer-config", "is not needed here: --prefill and --decode are numbers of workers"),
        ("worker", "--kv-transfer-config", "is --role here"),
        ("worker", "--master-addr", "is --dist-init-addr HOST:PORT here"),
        ("worker", "--shutdown-timeout", "is --drain-timeout here"),
        (
            "worker",
            "--structured-outputs-config.backend",
            "--structured-outputs-config of vLLM or SGLang is --gra",
        ),
        ("gateway", "--api-key", "is --api-keys FILE here"),
        ("up", "--enable-prefix-caching", "is not needed here: it is on without --disable-radix-cache"),
        # A command without the equivalent, and one that is no server.
        ("up", "--master-addr", ""),
        ("worker", "--data-parallel-size", ""),
        ("gateway", "--max-total-tokens", ""),
        ("router", "--api-key", ""),
        # Near in spelling, another thing.
        ("up", "--speculative-num-steps", ""),
        ("gateway", "--max-running-requests", ""),
        ("gateway", "--load-format", ""),
        ("router", "--ep", ""),
        # Typos.
        ("up", "--prot", "(did you mean --port?)"),
        ("up", "--prefill-workers", ""),
        ("up", "--max-runing-requests", "(did you mean --max-running-requests?)"),
        ("up", "--kvcache-dtype", "(did you mean --kv-cache-dtype?)"),
        ("worker", "--redis", ""),
        ("worker", "--redis-uri", "(did you mean --redis-url?)"),
        ("worker", "--helth-port", "(did you mean --health-port?)"),
        ("gateway", "--drain-notise", "(did you mean --drain-notice?)"),
        ("gateway", "--model-s", "(did you mean --models?)"),
        ("router", "--grpc-prt", "(did you mean --grpc-port?)"),
        ("router", "--zzz", ""),
    ],
)
def test_hint_is_correct_or_absent(command, flag, expected, parsers):
    found = hint(parsers[command], flag)
    assert expected in found
    assert bool(expected) == bool(found)


def test_error_is_a_usage_line_and_a_sentence_with_its_hint(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["up", "--enforce-eager"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "usage: tandem up [FLAG ...]",
        "tandem up: error: unrecognized arguments: --enforce-eager (--enforce-eager of vLLM or SGLang is "
        "--disable-cuda-graph here)",
    ]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("enforce_eager", "'enforce_eager': enforce_eager of vLLM or SGLang is disable_cuda_graph here"),
        ("max_total_tokens", "is num_pages here, in pages of page_size tokens"),
        ("trust_remote_code", "trust_remote_code of vLLM or SGLang is not supported here: Python code of"),
        ("tokenizer", "tokenizer of vLLM or SGLang is not needed here"),
        ("page_sise", "'page_sise': did you mean page_size?"),
        ("served_model_name", "'served_model_name'; there are "),
        ("disaggregation_mode", "'disaggregation_mode'; there are "),
    ],
)
def test_option_of_llm_has_the_same_hints(option, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config_from_options("x", {option: 1})
