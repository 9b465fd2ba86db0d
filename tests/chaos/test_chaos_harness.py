"""The chaos suite itself: it sees what it is there to see, and calls nothing kept that was not tested."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import httpx
import pytest

from tandem_testing.chaos import __main__ as command
from tandem_testing.chaos.catalogue import PROMISES, promise
from tandem_testing.chaos.compare import Damage, compare_answers, compare_sequences
from tandem_testing.chaos.families.crashes import a_decode_worker_dies
from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.knobs import KnobFile, KnobReader
from tandem_testing.chaos.machine import COMPUTING_S, Slowness, Worst, beside, worse
from tandem_testing.chaos.names import NameService, why_not
from tandem_testing.chaos.parts import Gateway, Part
from tandem_testing.chaos.report import stall_table, summary_line, totals
from tandem_testing.chaos.runner import Outcome
from tandem_testing.chaos.scenario import Reference, Result, Run, Scale
from tandem_testing.chaos.streams import Answer, ChoiceText, Kind, asks
from tandem_testing.chaos.suite import scenarios
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.system import python_path
from tandem_testing.waiting import until, wait_for

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
RIGHT = list("abcdefgh")


@pytest.mark.parametrize(
    ("got", "damage"),
    [
        ("abcdefgh", Damage()),
        ("abXdefgh", Damage(wrong=1)),
        ("abdefgh", Damage(missing=1)),
        ("abcdef", Damage(missing=2)),
        ("abccdefgh", Damage(doubled=1)),
        ("abcdbcdefgh", Damage(doubled=3)),
        ("abcXdefgh", Damage(wrong=1)),
        ("", Damage(missing=8)),
    ],
)
def test_lost_duplicated_and_wrong_tokens_are_counted_separately(got, damage):
    assert compare_sequences(RIGHT, list(got)) == damage


def answer(tokens: str, *, error: str | None = None, finishes: tuple[str, ...] = ("length",), shift: float = 0.0):
    (ask,) = asks(Kind.GREEDY, count=1, prompt_words=3, max_tokens=8)
    choice = ChoiceText(text=tokens, tokens=list(tokens), logprobs=[shift - 0.5] * len(tokens), finishes=list(finishes))
    return Answer(ask=ask, began=0.0, choices={0: choice}, usage={"completion_tokens": len(tokens)}, error=error)


def test_equal_answers_have_no_damage():
    assert not compare_answers(answer("abc"), answer("abc"))


def test_broken_stream_is_failed_and_its_prefix_compared():
    assert compare_answers(answer("abcdef"), answer("abc", error="gone", finishes=())) == Damage(failed=1)
    assert compare_answers(answer("abcdef"), answer("aXc", error="gone", finishes=())) == Damage(failed=1, wrong=1)


def test_two_finish_reasons_or_broken_logprobs_are_wrong():
    assert compare_answers(answer("abc"), answer("abc", finishes=("length", "length"))) == Damage(wrong=1)
    assert compare_answers(answer("abc"), answer("abc", shift=0.01)) == Damage(wrong=3)


def test_adapter_request_is_compared_with_its_reference():
    ask = replace(answer("a").ask, adapter="sql", salt="one")
    assert ask.body("base")["model"] == "sql"
    assert ask.unsalted == replace(answer("a").ask, adapter="sql") != answer("a").ask.unsalted
    assert answer("a").ask.body("base")["model"] == "base"


def test_missing_choice_is_missing_tokens():
    half = answer("abc")
    half.choices = {}
    damage = compare_answers(answer("abc"), half)
    assert damage.missing == 3


def test_only_silence_after_the_fault_is_recovery():
    received_at = Answer(ask=answer("a").ask, began=0.0, received_at=[5.0, 6.0, 9.0, 9.5])
    assert received_at.longest_silence(after=5.5) == 3.0
    assert received_at.longest_silence(after=8.0) == 1.0
    assert received_at.longest_silence(after=20.0) == 0.0


def test_slow_machine_extends_only_computing_share_of_bounds():
    assert Slowness(cores=8, workers=4, contention=1.0).allowed(3.0) == 3.0
    slow = Slowness(cores=2, workers=4, contention=1.5, quiet_s=0.5)
    assert slow.allowed(1.0) == 3 * 1.0 + 0.5
    assert slow.allowed(3.0) == 3.0 + 2 * COMPUTING_S + 0.5
    assert slow.allowed(10.0) == 10.0 + 2 * COMPUTING_S + 0.5


@pytest.mark.parametrize(("during", "factor"), [(1.0, 3.0), (2.5, 3.0), (12.0, 12.0)])
def test_slowness_during_scenario_extends_its_bound(during, factor):
    slow = Slowness(cores=2, workers=4, contention=1.5, during=during)
    assert slow.allowed(1.0) == 1.0 + (factor - 1.0)


async def test_probe_runs_during_scenario_and_ends_with_it():
    worst = Worst()
    async with beside(worst):
        await until(lambda: worst.contention > 1.0, 60.0, "three measurements")
    assert not [line for line in descendants(os.getpid()).values() if "process_time" in line]


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`, by pid."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {child: lines.get(child, "") for child in below - {pid}}


@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_terminated_chaos_suite_leaves_no_processes(tmp_path, number):
    argv = [sys.executable, "-m", "tandem_testing.chaos", "--only", "1", "--run-dir", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": python_path(ROOT / "tests/support")}
    suite = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, start_new_session=True
    )
    seen: dict[int, str] = {}

    def started() -> bool:
        seen.update(descendants(suite.pid))
        assert suite.poll() is None, f"the suite ended with {suite.returncode}"
        return any("redis-server" in line for line in seen.values()) and any(
            "gateway" in line for line in seen.values()
        )

    def over() -> bool:
        return not any(is_running(pid) for pid in seen)

    try:
        wait_for(started, PATIENCE_S)
        suite.send_signal(number)
        status = suite.wait(PATIENCE_S)
        assert status == (-number if number is signal.SIGKILL else 3)
        wait_for(over, PATIENCE_S, lambda: str({pid: seen[pid] for pid in seen if is_running(pid)}))
    finally:
        suite.kill()
        suite.wait()


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie, which waits for the process that adopted it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_attempts_that_finish_between_reads_are_not_lost(tmp_path):
    readings = count(10)

    def metrics(_: httpx.Request) -> httpx.Response:
        numbers = {"finished": next(readings), "stopped": 3, "worker_lost": 2}
        lines = [f'tandem_gateway_attempts_total{{outcome="{name}"}} {value}' for name, value in numbers.items()]
        return httpx.Response(200, text="\n".join(lines))

    gateways = [
        Gateway(part=Part(name=name, argv=[], log=tmp_path / name), url=f"http://{name}") for name in ("one", "other")
    ]
    redis, http = RedisServer(port=0), httpx.AsyncClient(transport=httpx.MockTransport(metrics))
    async with http:
        fleet = Fleet(folder=tmp_path, shape=Shape(), redis=redis, gateways=gateways, http=http)
        slowness = Slowness(cores=1, workers=1, contention=1.0)
        run = Run(
            fleet=fleet,
            reference=Reference(fleet=fleet),
            scale=Scale(),
            slowness=slowness,
            salt="",
            random=random.Random(0),
        )
        assert [await run.lost_attempts() for _ in range(3)] == [4, 4, 4]


def test_every_promise_of_the_table_has_a_test():
    available = scenarios()
    assert set(available) == {line.number for line in PROMISES}
    assert set(available) >= {*range(37), *range(47, 53), 54, *range(56, 68)}
    assert {1, 2, 6, 9, 16, 27} <= {number for number, each in available.items() if each.quick}
    assert a_decode_worker_dies.promise == promise(1)


def test_slower_of_two_measurements_of_the_machine_counts():
    one, other = (Slowness(cores=2, workers=4, contention=contention) for contention in (1.0, 1.5))
    assert worse(one, other) == worse(other, one) == other


def test_absent_promise_is_counted_as_absent_and_not_as_kept():
    line = promise(48)
    kept = Outcome(promise=promise(1), result=Result.KEPT, stalls=(0.1, 0.5), requests=2)
    broken = Outcome(promise=promise(2), result=Result.BROKEN, damage=Damage(wrong=3, failed=1))
    figures = totals([kept, broken, Outcome(promise=line, result=Result.ABSENT)])
    assert (figures["kept"], figures["broken"], figures["absent"]) == (1, [2], [line.number])
    assert (figures["wrong"], figures["failed"], figures["leaked"]) == (3, 1, 0)
    assert figures["recovery"] == {"p50": 0.1, "p90": 0.5, "p99": 0.5, "max": 0.5}
    assert json.loads(json.dumps(figures)) == figures


def test_stalls_are_reported_per_kind_over_all_runs():
    runs = [
        Outcome(promise=promise(36), result=Result.KEPT, samples={"drain, moved": (0.1, 0.3), "drain, not moved": ()}),
        Outcome(promise=promise(36), result=Result.KEPT, samples={"drain, moved": (0.2,)}),
        Outcome(promise=promise(1), result=Result.KEPT, samples={"kill -9 decode": (0.5,)}),
    ]
    assert totals(runs)["stalls"] == {
        "36 drain, moved": {"streams": 3, "p50": 0.2, "p90": 0.3, "p99": 0.3, "max": 0.3},
        "1 kill -9 decode": {"streams": 1, "p50": 0.5, "p90": 0.5, "p99": 0.5, "max": 0.5},
    }
    table = stall_table(runs)
    assert table is not None
    assert table.row_count == 2
    assert stall_table([Outcome(promise=promise(0), result=Result.KEPT)]) is None


def test_list_shows_every_number(capsys):
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert [int(line.split()[0]) for line in shown.splitlines()] == [line.number for line in PROMISES]


def test_scenarios_are_ordered_by_fleet_shape_reference_first():
    order = command.by_shape(list(scenarios().values()))
    assert order[0].promise.number == 0
    assert {each.promise.number for each in order} == set(scenarios())
    changes = sum(one.shape != other.shape for one, other in pairwise(order))
    assert changes == len({each.shape for each in order}) - 1


def test_untestable_scenario_is_listed_absent_with_reason(capsys, monkeypatch):
    unable = replace(scenarios()[48], why_not=lambda: "no mount namespace here")
    monkeypatch.setattr(command, "scenarios", lambda: scenarios() | {48: unable})
    assert command.main(["--list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" 48")]
    assert line.endswith("absent (no mount namespace here)")


def test_summary_lists_damage_counts_and_stall_percentiles():
    kept = Outcome(promise=promise(1), result=Result.KEPT, stalls=(0.1, 0.5), requests=2)
    line = summary_line([kept, Outcome(promise=promise(48), result=Result.ABSENT)])
    assert "1 kept, 0 broken, 1 absent" in line
    assert "0 wrong, 0 missing, 0 doubled, 0 failed, 0 leaked" in line
    assert "p50 0.10 s" in line
    assert "max 0.50 s" in line


def test_scenario_name_service_resolves_redirected_addresses(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    names = NameService(tmp_path)
    names.start()
    look = names.around([sys.executable, "-c", "import socket; print(socket.gethostbyname('redis.chaos.test'))"])
    assert subprocess.run(look, capture_output=True, check=False).returncode != 0
    for address in ("127.0.0.3", "127.0.0.2"):
        names.point("redis.chaos.test", address)
        assert subprocess.run(look, capture_output=True, text=True, check=True).stdout == f"{address}\n"


def test_unknown_number_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "1,99"])
    assert ended.value.code == 2
    assert "no scenario 99" in capsys.readouterr().err


def test_scenarios_of_a_family_are_chosen_by_its_name(capsys):
    parser = command.build_parser()
    assert parser.parse_args(["--only", "adapters"]).only == [67, 74]
    assert parser.parse_args(["--only", "16,drains"]).only[0] == 16
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "adapter"])
    assert "no family 'adapter': adapters, adapters_on_demand" in capsys.readouterr().err


def test_knobs_count_down_and_leave_evidence(tmp_path):
    file, reader = KnobFile(path=tmp_path / "w.knobs"), KnobReader(path=tmp_path / "w.knobs")
    assert not reader.take("corrupt")
    file.turn(corrupt=2, poison=7)
    os.utime(file.path, ns=(1, 1))
    assert [reader.take("corrupt") for _ in range(3)] == [True, True, False]
    assert reader.now().poison == 7
    assert file.committed("corrupt") == 2
    file.turn()
    assert not reader.take("corrupt")
    assert reader.now().poison == -1


def test_product_code_has_no_reference_to_knobs():
    sources = [path for part in ("engine", "services", "operator", "lab") for path in (ROOT / part).rglob("*.py")]
    assert len(sources) > 100
    assert [path for path in sources if "tandem_testing" in path.read_text("utf-8")] == []
