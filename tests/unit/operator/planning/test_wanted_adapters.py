"""Adapters of a service: which of them it should have, the next command, statuses, and what is refused."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem_operator.api.adapters import AdapterStatus
from tandem_operator.api.model_adapter import ModelAdapterSpec
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.adapters import (
    MAX_FAILED,
    MAX_LISTED,
    AdapterAsk,
    Failure,
    HeldAdapter,
    Load,
    Reading,
    Unload,
    WantedAdapter,
    accepted,
    next_command,
    statuses_of,
    to_announce,
)
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import Plan, make_plan, revision_of
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_cluster import service_of

A, B = "a" * 32, "b" * 32
POLICIES = (("a", "Always"), ("b", "Never"))
WORKERS = {"p": "prefill", "d": "decode"}
SQL = WantedAdapter(name="sql", folder="claims/adapters/sql")
HELD = HeldAdapter(digest=A, folder="claims/adapters/sql", workers=frozenset({"p", "d"}))


def claim(path: str = "sql", name: str = "adapters") -> dict[str, Any]:
    return {"claim": {"claimName": name, "path": path}}


def adapter(name: str = "sql", **fields: Any) -> dict[str, Any]:
    return {"name": name, "source": claim(name), **fields}


def ask(object_name: str, *, created: str = "2026-01-01T00:00:00Z", **fields: Any) -> AdapterAsk:
    spec = msgspec.convert({"serviceName": "chat", "source": claim(object_name), **fields}, ModelAdapterSpec)
    return AdapterAsk(name=object_name, created=created, generation=3, spec=spec)


def planned(spec: dict[str, Any], before: ModelServiceStatus | None = None, **observed: Any) -> Plan:
    seen = Observed(now="2026-01-01T00:00:00Z", ready_workers=WORKERS, **observed)
    return make_plan(service_of(**spec), seen, before or ModelServiceStatus(), 1, OperatorSettings())


def condition_of(conditions: Any, kind: str) -> tuple[str, str, str]:
    return next((one.status, one.reason, one.message) for one in conditions if one.type == kind)


def refusal(**spec: Any) -> str:
    status, reason, message = condition_of(planned(spec).status.conditions, "Valid")
    assert (status, reason) == ("False", "InvalidSpec")
    return message


@pytest.mark.parametrize(
    ("spec", "error_message"),
    [
        ({"adapters": [adapter("chat")]}, "spec.adapters[0].name: 'chat' is the name of the model"),
        (
            {"aliases": ["gpt"], "adapters": [adapter(), adapter("gpt")]},
            "spec.adapters[1].name: 'gpt' is an alias of the model",
        ),
        ({"adapters": [adapter(), adapter()]}, "spec.adapters: 'sql' is given 2 times; remove all but one"),
        (
            {"adapters": [adapter(pinned=True)], "engine": {"lora": {"maxCpuLoras": 1}}},
            "pin at most 0, or raise engine.lora.maxCpuLoras",
        ),
        (
            {"adapters": [adapter()], "decode": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}},
            "spec.adapters: adapters are computed on CPUs, and decode workers have GPUs",
        ),
        (
            {"adapters": [adapter()], "engine": {"args": ["--lora-dir=/models"]}},
            "spec.engine.args[0]: --lora-dir: the operator sets it",
        ),
        (
            {"adapters": [adapter()], "decode": {"engine": {"args": ["--lora-modules=x=y"]}}},
            "spec.decode.engine.args[0]: --lora-modules: its adapters would be below the folder of spec.adapters",
        ),
        (
            {
                "adapters": [
                    {"name": n, "source": {"image": {"reference": "r:1", "pullPolicy": p}}} for n, p in POLICIES
                ]
            },
            "spec.adapters[1].source: the same as of spec.adapters[0], with other settings",
        ),
        (
            {"engine": {"args": ["--max-lora-rank=8"]}},
            "--max-lora-rank has a field; remove it and set spec.engine.lora.maxLoraRank",
        ),
    ],
)
def test_wrong_adapter_is_refused_by_its_field(spec, error_message):
    assert error_message in refusal(**spec)


def test_flags_for_adapters_in_args_work_without_the_fields():
    plan = planned({"engine": {"args": ["--lora-modules=x=y", "--lora-dir=/models"]}})
    assert condition_of(plan.status.conditions, "Valid")[0] == "True"


def test_adapters_of_workers_with_several_ranks_are_accepted():
    plan = planned({"adapters": [adapter()], "engine": {"tensorParallelSize": 2}})
    assert condition_of(plan.status.conditions, "Valid")[0] == "True"


def test_further_adapter_on_a_claim_changes_no_object():
    one = {"adapters": [adapter()]}
    two = {"adapters": [adapter(), adapter("chat-2", digest=A, pinned=True)]}
    assert planned(one).apply == planned(two).apply
    assert planned({"adapterClaims": ["adapters"]}).apply == planned(one).apply
    assert planned({}).apply != planned(one).apply
    assert revision_of(service_of()) == revision_of(service_of(**two))


def test_spec_precedes_older_model_adapters():
    service = service_of(adapters=[adapter()])
    late = ask("late", created="2026-01-03T00:00:00Z", name="law")
    early = ask("early", created="2026-01-02T00:00:00Z", name="law", digest=B, pinned=True)
    found = accepted(service, [late, early, ask("x", name="sql"), ask("y", name="chat")])
    assert found.wanted == (
        SQL,
        WantedAdapter(name="law", folder="claims/adapters/early", digest=B, pinned=True, model_adapter="early"),
    )
    assert {name: one.reason for name, one in found.refusals.items()} == dict.fromkeys(("late", "x", "y"), "NameTaken")
    assert "'law' is the name of an adapter of ModelAdapter 'early'" in found.refusals["late"].message
    assert "'sql' is the name of an adapter of spec.adapters" in found.refusals["x"].message
    assert found.refusals["y"].message.startswith("spec.name: 'chat' is the name of the model")


def test_claim_that_is_not_mounted_is_refused():
    found = accepted(service_of(adapterClaims=["shared"]), [ask("sql")])
    assert found.wanted == ()
    assert found.refusals["sql"].reason == "NotMounted"
    assert "do not mount 'adapters'; add it to its spec.adapterClaims" in found.refusals["sql"].message


def test_undecodable_model_adapter_is_refused():
    broken = AdapterAsk(name="x", created="", generation=1, spec=None, problem="spec.source: unknown")
    found = accepted(service_of(adapterClaims=["adapters"]), [broken])
    assert found.refusals["x"].message == "spec.source: unknown"


@pytest.mark.parametrize(
    ("wanted", "held", "expected"),
    [
        (SQL, None, Load(wanted=SQL, digest="")),
        (SQL, HELD, None),
        (SQL, HeldAdapter(digest=A, folder="other"), Load(wanted=SQL, digest="")),
    ],
)
def test_adapter_not_registered_as_wanted_is_loaded(wanted, held, expected):
    reading = Reading(held={} if held is None else {"sql": held})
    assert next_command([wanted], {"sql": False}, reading, WORKERS, []) == expected


def test_another_digest_is_loaded_with_that_digest():
    wanted = WantedAdapter(name="sql", folder=SQL.folder, digest=B)
    assert next_command([wanted], {"sql": False}, Reading(held={"sql": HELD}), WORKERS, []) == Load(
        wanted=wanted, digest=B
    )


def test_pinned_adapter_is_loaded_where_it_is_missing():
    """With the digest that its name stands for, so that a changed directory replaces nothing."""
    pinned, more = WantedAdapter(name="sql", folder=SQL.folder, pinned=True), {**WORKERS, "d2": "decode"}
    command = Load(wanted=pinned, digest=A)
    everywhere = HeldAdapter(digest=A, folder=SQL.folder, workers=frozenset(more))
    known = {"sql": frozenset(WORKERS)}
    listed = {"sql": True}
    assert next_command([pinned], listed, Reading(held={"sql": HELD}, pinned_on=known), WORKERS, []) is None
    assert next_command([pinned], listed, Reading(held={"sql": HELD}, pinned_on=known), more, []) == command
    assert next_command([pinned], listed, Reading(held={"sql": everywhere}, pinned_on=known), more, []) == command
    assert next_command([pinned], listed, Reading(held={"sql": everywhere}), more, []) == command, "after a restart"


def test_pin_that_is_gone_from_the_spec_is_taken_back():
    reading = Reading(held={"sql": HELD})
    assert next_command([SQL], {"sql": False}, reading, WORKERS, []) is None
    assert next_command([SQL], {"sql": True}, reading, WORKERS, []) == Load(wanted=SQL, digest=A)
    done = Reading(held={"sql": HELD}, pinned_on={"sql": frozenset()})
    assert next_command([SQL], {"sql": True}, done, WORKERS, []) is None
    (status,) = statuses_of([SQL], [AdapterStatus(name="sql", pinned=True)], reading, WORKERS)
    assert status.pinned
    (status,) = statuses_of([SQL], [AdapterStatus(name="sql", pinned=True)], done, WORKERS)
    assert not status.pinned


def test_only_listed_names_are_loaded_and_unloaded():
    """The status is the memory: what people have loaded by themselves stays."""
    assert next_command([SQL], {}, Reading(held={}), WORKERS, []) is None
    assert next_command([], {}, Reading(held={"sql": HELD}), WORKERS, []) is None
    assert next_command([], {"sql": False}, Reading(held={"sql": HELD}), WORKERS, []) == Unload(name="sql")
    assert next_command([], {"sql": False}, Reading(held={}), WORKERS, []) is None


def test_nothing_is_loaded_while_it_is_held_back():
    assert next_command([SQL], {"sql": False}, Reading(held={}), WORKERS, ["sql"]) is None
    assert next_command([SQL], {"sql": False}, Reading(held={}), {}, []) is None
    assert next_command([], {"sql": False}, Reading(held={"sql": HELD}), WORKERS, ["sql"]) is None


def test_loaded_adapter_counts_ready_workers_that_have_it():
    held = HeldAdapter(digest=A, folder=SQL.folder, workers=frozenset({"d", "gone"}))
    (status,) = statuses_of([SQL], [], Reading(held={"sql": held}), WORKERS)
    assert (status.state, status.digest, status.prefill, status.decode) == ("Loaded", A, 0, 1)
    assert (status.source, status.message, status.failed) == (SQL.folder, "", [])


def test_failure_counts_for_what_has_failed_alone():
    failure = Failure(wanted=SQL, message="d: r 128", workers={"d": "r 128"})
    reading = Reading(held={}, failures={"sql": failure})
    (status,) = statuses_of([SQL], [], reading, WORKERS)
    assert (status.state, status.message) == ("Failed", "d: r 128")
    assert [(one.name, one.reason) for one in status.failed] == [("d", "r 128")]
    changed = WantedAdapter(name="sql", folder="claims/adapters/sql-2")
    (status,) = statuses_of([changed], [], reading, WORKERS)
    assert (status.state, status.message, status.failed) == ("Pending", "it is being loaded", [])


def test_failed_load_for_a_request_is_in_the_status():
    held = replace(HELD, failed={"d3": "files have changed", "d2": "no such folder"})
    failure = Failure(wanted=SQL, message="m", workers={"d2": "slow"})
    (status,) = statuses_of([SQL], [], Reading(held={"sql": held}, failures={"sql": failure}), WORKERS)
    assert status.state == "Loaded"
    assert [(one.name, one.reason) for one in status.failed] == [("d2", "slow"), ("d3", "files have changed")]


def test_failures_of_requests_crowd_out_none_of_a_command():
    held = replace(HELD, failed={f"d{number:02d}": "no such folder" for number in range(2 * MAX_FAILED)})
    failure = Failure(wanted=SQL, message="1 worker has not carried it out", workers={"z": "r 128"})
    (status,) = statuses_of([SQL], [], Reading(held={"sql": held}, failures={"sql": failure}), WORKERS)
    names = [one.name for one in status.failed]
    assert names == ["z", *(f"d{number:02d}" for number in range(MAX_FAILED - 1))]


def test_failed_worker_of_a_loaded_adapter_is_named():
    reading = Reading(held={"sql": HELD}, failures={"sql": Failure(wanted=SQL, message="m", workers={"d2": "slow"})})
    (status,) = statuses_of([SQL], [], reading, WORKERS)
    assert (status.state, [one.name for one in status.failed]) == ("Loaded", ["d2"])


def test_removed_adapter_is_listed_until_it_is_unloaded():
    before = [AdapterStatus(name="sql", source=SQL.folder, digest=A, state="Loaded")]
    (status,) = statuses_of([], before, Reading(held={"sql": HELD}), WORKERS)
    assert (status.name, status.state, status.digest) == ("sql", "Unloading", A)
    (status,) = statuses_of([], before, Reading(problem="no gateway pod is ready"), WORKERS)
    assert (status.state, status.message) == ("Unloading", "no gateway pod is ready")
    assert statuses_of([], before, Reading(held={}), WORKERS) == []


def test_model_adapters_pin_no_more_than_workers_have_room_for():
    service = service_of(
        adapters=[adapter(pinned=True)], adapterClaims=["adapters"], engine={"lora": {"maxCpuLoras": 3}}
    )
    asks = [ask("a", pinned=True), ask("b", pinned=True), ask("c")]
    found = accepted(service, asks)
    assert [one.name for one in found.wanted] == ["sql", "a", "c"]
    assert {name: one.reason for name, one in found.refusals.items()} == {"b": "TooManyPinned"}
    assert "maxCpuLoras" in found.refusals["b"].message


def test_no_adapter_that_is_loaded_leaves_a_full_list():
    """Else no command would ever unload it."""
    old = [AdapterStatus(name=f"old-{number:03}", state="Loaded") for number in range(MAX_LISTED)]
    new = [WantedAdapter(name=f"a-{number:03}", folder="claims/adapters/new") for number in range(MAX_LISTED)]
    reading = Reading(held={one.name: HELD for one in old})
    assert {one.name for one in statuses_of(new, old, reading, WORKERS)} == {one.name for one in old}
    reading = Reading(held={one.name: HELD for one in old[1:]})
    listed = statuses_of(new, old, reading, WORKERS)
    assert (len(listed), listed[0].name, listed[1].name) == (MAX_LISTED, "a-000", "old-001")
    assert len(statuses_of(new, listed, Reading(held={}), WORKERS)) == MAX_LISTED


def test_condition_follows_the_adapters():
    spec = {"adapters": [adapter()]}
    waiting = planned(spec).status
    assert condition_of(waiting.conditions, "AdaptersReady")[:2] == ("Unknown", "Loading")
    failures = {"sql": Failure(wanted=SQL, message="r 128 is above 64")}
    failed = planned(spec, waiting, adapters=Reading(held={}, failures=failures)).status
    assert condition_of(failed.conditions, "AdaptersReady") == ("False", "AdapterFailed", "sql: r 128 is above 64")
    assert failed.error == "AdapterFailed: sql: r 128 is above 64"
    loaded = planned(spec, failed, adapters=Reading(held={"sql": HELD})).status
    assert condition_of(loaded.conditions, "AdaptersReady")[:2] == ("True", "AllLoaded")
    none = planned({}, loaded, adapters=Reading(held={})).status
    assert condition_of(none.conditions, "AdaptersReady")[:2] == ("True", "NoAdapters")
    assert "AdaptersReady" not in {one.type for one in planned({}).status.conditions}


def test_refused_spec_keeps_the_adapters_of_the_status():
    before = ModelServiceStatus(adapters=[AdapterStatus(name="sql", state="Loaded")])
    plan = planned({"adapters": [adapter("chat")]}, before)
    assert plan.status.adapters == before.adapters
    assert plan.model_adapters == {}


def test_statuses_of_model_adapters_name_workers_and_reasons():
    asks = (ask("sql"), ask("law", name="chat"))
    spec = {"adapterClaims": ["adapters"]}
    plan = planned(spec, adapter_requests=asks, adapters=Reading(held={"sql": HELD}))
    served, refused = plan.model_adapters["sql"], plan.model_adapters["law"]
    assert condition_of(served.conditions, "Accepted")[:2] == ("True", "Accepted")
    assert condition_of(served.conditions, "Ready")[:2] == ("True", "Loaded")
    assert (served.digest, served.loaded, [one.name for one in served.workers]) == (A, 2, ["d", "p"])
    assert served.observed_generation == 3
    assert condition_of(refused.conditions, "Accepted")[:2] == ("False", "NameTaken")
    assert condition_of(refused.conditions, "Ready")[:2] == ("False", "NotAccepted")
    assert [(one.name, one.model_adapter) for one in plan.status.adapters] == [("sql", "sql")]


MOST = 1 << 20
"""Bytes of a status, of at most 1.5 MiB that etcd takes for an object with its spec."""


@pytest.mark.parametrize("character", ["x", "\x01", "\N{GRINNING FACE}"], ids=["plain", "escaped", "wide"])
def test_status_of_256_adapters_on_1000_workers_fits_into_etcd(character):
    workers = {f"chat-decode-{number:04d}-{'p' * 200}": "decode" for number in range(1000)}
    reasons = dict.fromkeys(workers, character * 600)
    wanted = [
        WantedAdapter(name=f"{number:03}" + "n" * 125, folder="claims/adapters/sql", model_adapter=f"m{number}")
        for number in range(MAX_LISTED)
    ]
    held = replace(HELD, digest=B, workers=frozenset(workers), failed=dict([*reasons.items()][8:16]), failures=500)
    failures = {
        one.name: Failure(
            wanted=one, message=character * 4096, workers=dict([*reasons.items()][:MAX_FAILED]), failures=1000
        )
        for one in wanted
    }
    reading = Reading(held={one.name: held for one in wanted}, failures=failures)
    status = ModelServiceStatus(adapters=statuses_of(wanted, [], reading, workers))
    assert len(msgspec.json.encode(status)) < MOST
    assert {(one.decode, one.failed_workers, len(one.failed)) for one in status.adapters} == {(1000, 1000, 1)}
    assert len(status.adapters) == MAX_LISTED


def test_reason_with_half_a_surrogate_pair_is_shown():
    """JSON of a gateway may escape one; UTF-8 of a status has none."""
    failure = Failure(wanted=SQL, message="\ud800 m", workers={"d2": "r \udfff"})
    (status,) = statuses_of([SQL], [], Reading(held={}, failures={"sql": failure}), WORKERS)
    assert (status.message, status.failed[0].reason) == ("? m", "r ?")


def test_few_failing_adapters_name_more_workers():
    failure = Failure(wanted=SQL, message="m", workers={f"d{n}": "r 128" for n in range(MAX_FAILED)}, failures=900)
    (status,) = statuses_of([SQL], [], Reading(held={}, failures={"sql": failure}), WORKERS)
    assert (len(status.failed), status.failed_workers) == (MAX_FAILED, 900)


def test_names_that_the_next_worker_loads_are_announced():
    assert to_announce([SQL], [], Reading(held={})) == frozenset(), "the status does not list it yet"
    assert to_announce([SQL], ["sql"], Reading(held={})) == {"sql"}
    failure = Failure(wanted=SQL, message="r 128")
    assert to_announce([SQL], ["sql"], Reading(held={}, failures={"sql": failure})) == frozenset()
    changed = replace(SQL, folder="claims/adapters/sql-2")
    assert to_announce([changed], ["sql"], Reading(held={}, failures={"sql": failure})) == {"sql"}
    assert to_announce([], ["sql"], Reading(held={})) == frozenset()


def test_removed_name_is_listed_until_it_is_withdrawn():
    before = [AdapterStatus(name="sql", source=SQL.folder)]
    (status,) = statuses_of([], before, Reading(held={}, announced=frozenset({"sql"})), {})
    assert (status.name, status.state) == ("sql", "Unloading")
    assert statuses_of([], before, Reading(held={}), {}) == []
