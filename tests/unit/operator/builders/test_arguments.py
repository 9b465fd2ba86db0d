"""`args` of a ModelService: allowed flags, what becomes of them, and where they are checked."""

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.builders.arguments import CHECK, GATEWAY, WORKER, FlagTable, argument_problems
from tandem_operator.planning.observed import DeploymentSeen, Observed
from tandem_operator.planning.plan import make_plan, revision_of
from tandem_operator.planning.status import ARGUMENTS_ACCEPTED
from tandem_operator.settings import OperatorSettings
from tandem_services.cli.main import build_parser, main
from tandem_services.cli.parsing.flag_table import settings_of
from tandem_testing.kube_cluster import service_of

MINIMAL = yaml.safe_load((Path(__file__).parents[4] / "examples/minimal.yaml").read_text())["spec"]
NOW = "2026-01-01T00:00:00Z"
TABLES = pytest.mark.parametrize(("command", "table"), [("worker", WORKER), ("gateway", GATEWAY)])


def spec_with(place: str, *words: str, **more: Any) -> dict[str, Any]:
    """`place`: of the list, such as `prefill.engine.args`."""
    spec: dict[str, Any] = {**MINIMAL, **more}
    part = spec
    *outer, last = place.split(".")
    for name in outer:
        part[name] = dict(part.get(name, {}))
        part = part[name]
    part[last] = list(words)
    return spec


def pods_of(spec: dict[str, Any], observed: Observed | None = None) -> dict[str, dict[str, Any]]:
    plan = make_plan(service_of(spec), observed or Observed(now=NOW), ModelServiceStatus(), 1, OperatorSettings())
    deployments = (one for one in plan.apply if one["kind"] == "Deployment")
    return {one["metadata"]["labels"].get("tandem.dev/role", "gateway"): one["spec"]["template"]["spec"]
            for one in deployments if "redis" not in one["metadata"]["name"]}  # fmt: skip


def command_parser(command: str) -> argparse.ArgumentParser:
    (nested,) = (one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = nested.choices[command]
    return parser


@TABLES
def test_every_flag_of_a_command_has_one_place(command: str, table: FlagTable) -> None:
    names = [
        [name for name in setting.action.option_strings if not name.startswith("--no-")]
        for setting in settings_of(command_parser(command))
    ]
    placed = [*table.fields, *table.operator, *table.arguments]
    assert sorted(placed) == sorted(first for first, *_ in names)
    assert table.aliases == {other: first for first, *others in names for other in others}
    assert table.weights | table.repeatable <= table.arguments


@TABLES
def test_every_flag_that_is_no_setting_is_unusable_in_pods(command: str, table: FlagTable) -> None:
    parser = command_parser(command)
    settings = [setting.action for setting in settings_of(parser)]
    others = {action.option_strings[-1] for action in parser._actions if action not in settings}
    assert table.unusable == others


@TABLES
def test_every_field_of_a_table_is_one_of_the_spec(command: str, table: FlagTable) -> None:
    for path in table.fields.values():
        part: Any = ModelServiceSpec
        for name in path.split("."):
            (field,) = (one for one in msgspec.structs.fields(part) if one.encode_name == name)
            options = (field.type, *getattr(field.type, "__args__", ()))
            part = next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)


@pytest.mark.parametrize(
    ("place", "words", "problem"),
    [
        ("engine.args", ["--redis-url=redis://x"], "spec.engine.args[0]: the operator sets --redis-url itself; remove"),
        ("engine.args", ["--allow-remote-orders"], "the operator sets --allow-remote-orders itself"),
        ("engine.args", ["--watermark=1", "--tp=2"], "spec.engine.args[1]: --tensor-parallel-size has a field; remove"),
        ("prefill.engine.args", ["--quantization=int8"], "set spec.engine.quantization"),
        (
            "decode.engine.args",
            ["--watermark=1", "--watermark=2"],
            "spec.decode.engine.args[1]: --watermark is given tw",
        ),
        ("engine.args", ["--config=/models/settings.yaml"], "spec.engine.args[0]: --config is not for pods; remove it"),
        ("gateway.args", ["--check-args"], "--check-args is not for pods"),
        ("engine.args", ["--load-format=$(TOKEN)"], "spec.engine.args[0]: Kubernetes replaces $(NAME) and $$ in"),
        ("gateway.args", ["--new-flag=$$"], "write the value of --new-flag itself"),
        ("gateway.args", ["--no-console"], "--console has a field; remove it and set spec.gateway.console"),
        ("gateway.args", ["--admin-host=::"], "spec.gateway.args[0]: the operator sets --admin-host itself"),
    ],
)
def test_flag_with_another_place_is_refused_by_name(place: str, words: list[str], problem: str) -> None:
    (found,) = argument_problems(service_of(spec_with(place, *words)))
    assert problem in found


@pytest.mark.parametrize("place", ["engine.args", "gateway.args"])
def test_no_spelling_of_a_flag_of_the_operator_or_a_field_is_accepted(place: str) -> None:
    """With a value and without, by every name that the command knows, and as `--no-`."""
    table = KNOWN[place]
    taken = {*table.operator, *table.fields}
    flags = taken | {name for name, flag in table.aliases.items() if flag in taken}
    spellings = [*flags, *(f"{flag}=7" for flag in flags), *(f"--no-{flag.removeprefix('--')}" for flag in taken)]
    assert [word for word in spellings if not [*argument_problems(service_of(spec_with(place, word)))]] == []


@pytest.mark.parametrize("word", ["watermark", "-x", "--", "--a b", "--Tp=1", "--x=a\nb", "--x=" + "a" * 1024])
def test_word_that_is_not_one_flag_is_refused_by_the_schema(word: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="args"):
        service_of(spec_with("engine.args", word))


KNOWN = {"engine.args": WORKER, "prefill.engine.args": WORKER, "decode.engine.args": WORKER, "gateway.args": GATEWAY}
PARTS = {"engine.args": ("prefill", "decode"), "prefill.engine.args": ("prefill",), "decode.engine.args": ("decode",)}


@st.composite
def given_words(draw: st.DrawFn, place: str) -> list[str]:
    """Flags of all kinds, their beginnings, unknown ones, with and without values."""
    table = KNOWN[place]
    flags = sorted({*table.fields, *table.operator, *table.arguments, *table.aliases, *table.unusable})
    cut = st.builds(lambda flag, by: flag[: max(3, len(flag) - by)], st.sampled_from(flags), st.integers(0, 6))
    negated = st.sampled_from(flags).map(lambda flag: f"--no-{flag.removeprefix('--')}")
    flag = st.one_of(
        st.sampled_from(flags), cut, negated, st.from_regex(r"\A--[a-z][-a-z0-9]{0,12}\Z"), st.just("--model-")
    )
    value = st.one_of(st.none(), st.text("abc=-$(){} /,.0123456789", max_size=12))
    word = st.builds(lambda name, text: name if text is None else f"{name}={text}", flag, value)
    return draw(st.lists(word, max_size=6))


@pytest.mark.parametrize("place", KNOWN)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_accepted_arguments_leave_the_words_of_the_operator(
    place: str, data: st.DataObject
) -> None:  # [operator-words-stay]
    """The same words in the same order, and no setting of them has another value afterwards."""
    try:
        service = service_of(spec := spec_with(place, *data.draw(given_words(place))))
    except msgspec.ValidationError:
        return
    if [*argument_problems(service)]:
        return
    plain, pods = pods_of(MINIMAL), pods_of(spec)
    for part in PARTS.get(place, ("gateway",)):
        own = plain[part]["containers"][0]["args"]
        words = pods[part]["containers"][0]["args"]
        assert words[: len(own)] == own
        parser = command_parser("gateway" if part == "gateway" else "worker")
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                parsed = vars(parser.parse_args(words))
        except SystemExit:
            continue  # the init container ends with these words too, so they replace no pod
        kept = vars(parser.parse_args(own))
        set_here = {setting.action.dest for setting in settings_of(parser) if setting.action.option_strings[0] in own}
        assert {name: parsed[name] for name in set_here} == {name: kept[name] for name in set_here}


def test_several_adapters_reach_the_worker() -> None:
    spec = spec_with("engine.args", "--lora-modules=a=/model/a", "--lora-modules=b=/model/b")
    assert [*argument_problems(service_of(spec))] == []
    container = pods_of(spec)["decode"]["containers"][0]
    parsed = build_parser().parse_args([*container["command"][1:], *container["args"]])
    assert parsed.lora_modules == ["a=/model/a", "b=/model/b"]


def test_flags_of_a_role_replace_the_common_ones() -> None:
    spec = spec_with("engine.args", "--watermark=0.1", "--num-pages=9")
    pods = pods_of(spec_with("decode.engine.args", "--watermark=0.2", **{"engine": spec["engine"]}))
    assert pods["prefill"]["containers"][0]["args"][-2:] == ["--watermark=0.1", "--num-pages=9"]
    assert pods["decode"]["containers"][0]["args"][-2:] == ["--num-pages=9", "--watermark=0.2"]


def test_pods_without_arguments_have_no_check() -> None:
    for pod in pods_of(MINIMAL).values():
        assert CHECK not in [one["name"] for one in pod.get("initContainers", [])]


@pytest.mark.parametrize(
    ("place", "role", "good", "bad", "sentence"),
    [
        ("engine.args", "prefill", "--watermark=0.1", "--watermark=x", "--watermark: invalid"),
        ("decode.engine.args", "decode", "--num-pages=64", "--num-page=64", "--num-page"),
        ("gateway.args", "gateway", "--explain-candidates=1", "--explain-candidates=-1", "--explain-candidates: "),
    ],
)
def test_image_checks_arguments_before_it_serves(
    place: str, role: str, good: str, bad: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TANDEM_HOST", "10.0.0.7")
    for word, status in ((good, 0), (bad, 2)):
        pod = pods_of(spec_with(place, word))[role]
        check = pod["initContainers"][0]
        assert check["name"] == CHECK
        assert check["image"] == pod["containers"][0]["image"]
        assert check["args"] == [*pod["containers"][0]["args"], "--check-args"]
        try:
            ended = main([*check["command"][1:], *check["args"]])
        except SystemExit as error:
            ended = error.code
        assert ended == status
        shown = capsys.readouterr()
        assert shown.out == ""
        assert (sentence in shown.err) == (status == 2)


def test_arguments_that_decide_weights_make_a_revision() -> None:
    plain = revision_of(service_of(MINIMAL))
    assert revision_of(service_of(spec_with("engine.args", "--watermark=0.1"))) == plain
    assert revision_of(service_of(spec_with("gateway.args", "--explain-candidates=1"))) == plain
    found = {
        revision_of(service_of(spec_with(place, word)))
        for place, word in (
            ("engine.args", "--load-format=dummy"),
            ("prefill.engine.args", "--load-format=dummy"),
            ("engine.args", "--flag-of-a-newer-image=1"),
        )
    }
    found |= {revision_of(service_of({**MINIMAL, "engine": {name: "auto"}})) for name in ("quantization", "modelImpl")}
    assert len(found | {plain}) == 6


def condition_of(spec: dict[str, Any], *deployments: DeploymentSeen) -> tuple[str, str, str] | None:
    plan = make_plan(
        service_of(spec), Observed(now=NOW, deployments=deployments), ModelServiceStatus(), 1, OperatorSettings()
    )
    found = [one for one in plan.status.conditions if one.type == ARGUMENTS_ACCEPTED]
    return (found[0].status, found[0].reason, found[0].message) if found else None


def checked(spec: dict[str, Any], *parts: str) -> list[DeploymentSeen]:
    """Deployments of the spec, of which those of `parts` have a pod that has accepted its arguments."""
    service = service_of(spec)
    found = []
    for part, pod in pods_of(spec).items():
        role, name = (None, "chat-gateway") if part == "gateway" else (part, f"chat-{part}-1")
        revision = revision_of(service) if role else None
        args = pod.get("initContainers", [{}])[0].get("args", [])
        accepted = tuple(args) if part in parts else ()
        found.append(DeploymentSeen(name=name, replicas=1, role=role, revision=revision, accepted=accepted))
    return found


def test_condition_has_what_the_image_says() -> None:  # [image-knows-flags]
    spec = spec_with("engine.args", "--watermark=0.1")
    assert condition_of(MINIMAL) is None
    unchecked = ("Unknown", "NotChecked", "no pod has checked the arguments of prefill, decode yet")
    assert condition_of(spec) == condition_of(spec, *checked(spec)) == unchecked
    assert condition_of(spec, *checked(spec, "prefill", "decode")) == ("True", "Accepted", "")
    new = spec_with("engine.args", "--new-flag")
    status, reason, message = condition_of(new) or ("", "", "")
    assert (status, reason) == ("Unknown", "UnknownFlag")
    assert "--new-flag" in message
    assert condition_of(new, *checked(new, "prefill", "decode")) == ("True", "Accepted", "")
    refused = DeploymentSeen(
        name="chat-prefill-1", replicas=1, role="prefill", failure=f"{CHECK}: ended with status 2: argument --x: no"
    )
    assert condition_of(spec, refused) == (
        "False",
        "ArgumentRefused",
        "chat-prefill-1: ended with status 2: argument --x: no",
    )


@pytest.mark.parametrize("failure", ["ErrImagePull: not found", "OOMKilled", "ended with status 20", "ended with 2"])
def test_other_failures_of_the_check_refuse_no_argument(failure: str) -> None:
    seen = DeploymentSeen(name="chat-prefill-1", replicas=1, role="prefill", failure=f"{CHECK}: {failure}")
    status, reason, _ = condition_of(spec_with("engine.args", "--watermark=0.1"), seen) or ("", "", "")
    assert (status, reason) == ("Unknown", "NotChecked")


@pytest.mark.parametrize("place", ["engine.args", "decode.engine.args", "gateway.args"])
def test_check_results_of_former_arguments_are_not_used_for_new_ones(place: str) -> None:
    """Within a revision: pods of the former template are ready, and have checked other words."""
    name = "--explain-candidates" if place == "gateway.args" else "--watermark"
    former, now = spec_with(place, f"{name}=0.1"), spec_with(place, f"{name}=0.2")
    everything = checked(former, "prefill", "decode", "gateway")
    assert (condition_of(former, *everything) or ("",))[0] == "True"
    assert (condition_of(now, *everything) or ("",))[0] == "Unknown"
