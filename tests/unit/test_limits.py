"""Judgements of `make limits`: which figures break a promise, and what a case that fails leaves of a run."""

import json
import os
import subprocess
import sys
from threading import Event, Thread
from time import process_time
from types import SimpleNamespace
from typing import Any

import pytest

from tandem_testing.control_groups import can_limit, new_group
from tandem_testing.limits import __main__ as limits
from tandem_testing.limits.places import Place, problem

BURN_S = 0.3
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"
SERVED = {"statuses": [200, 200, 200], "tracebacks": []}
NAMED = {"ended": 3, "said": "runs 12 of at most 30 threads"}


@pytest.mark.parametrize(
    ("case", "figures"),
    [
        ("cpu", {"ended": {"200": 127, "503": 1}, "ratio": 1.0}),
        ("cpu", {"ended": {"200": 128}, "ratio": 0.7}),
        ("memory", {"ended": {"200": 8}, "kills": 1}),
        ("processes", {"ended": {"200": 8}, "grammars": {"503": 3, "ReadError": 1}}),
        ("descriptors", {"ended": {"200": 8, "ConnectError": 1}}),
        ("places", {"problem": "it does not serve"}),
        ("places", {"error": "ReadTimeout: "}),
    ],
)
def test_figures_outside_a_promise_are_broken(case, figures):
    assert limits.broken(case, figures)


@pytest.mark.parametrize(
    ("case", "figures"),
    [
        ("cpu", {"ended": {"200": 128}, "ratio": 0.9}),
        ("memory", {"ended": {"200": 8}, "kills": 0}),
        ("processes", {"ended": {"200": 8}, "grammars": {"503": 4}}),
        ("descriptors", {"ended": {"200": 8, "503": 1}}),
        ("places", {**SERVED, "problem": ""}),
        ("places", {"not_checked": "nothing can be mounted here"}),
    ],
)
def test_figures_within_a_promise_are_not_broken(case, figures):
    assert not limits.broken(case, figures)


def test_case_with_an_error_is_printed_and_fails(monkeypatch, capsys):
    def ends() -> Any:
        raise AssertionError("tandem up ended with 3")

    monkeypatch.setattr(limits, "descriptors", ends)
    assert limits.main(["--only", "descriptors"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"case": "descriptors", "error": "AssertionError: tandem up ended with 3"}


def test_cpu_time_of_ended_children_is_counted():
    group: Any = SimpleNamespace(processes=lambda: {os.getpid(), ended.pid})
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    before, own = limits.used_cpu_s(group), process_time()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    of_children = limits.used_cpu_s(group) - before - (process_time() - own)
    assert of_children > BURN_S - 2 / limits.TICKS


@pytest.mark.skipif(not can_limit("pids"), reason="NOT CHECKED: no control group of processes can be made here")
def test_group_of_few_processes_starts_beside_many_threads():
    """As of a worker of pytest, in which many tests have run."""
    over = Event()
    threads = [Thread(target=over.wait) for _ in range(20)]
    try:
        for thread in threads:
            thread.start()
        with new_group("pids") as group:
            group.limit(10)
            assert subprocess.run([*group.starting(), "true"], check=False).returncode == 0
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("place", "figures", "found"),
    [
        (Place(name="any"), SERVED, ""),
        (Place(name="any"), {"statuses": [200, 500], "tracebacks": []}, "it does not serve"),
        (Place(name="any"), NAMED, "it does not serve"),
        (Place(name="any"), {**SERVED, "tracebacks": ["up.out"]}, "there is a traceback"),
        (Place(name="any", refused="at most 30"), NAMED, ""),
        (Place(name="any", refused="at most 40"), NAMED, "no error that matches 'at most 40'"),
        (Place(name="any", refused="at most 30"), {**NAMED, "ended": 1}, "no error that matches 'at most 30'"),
        (Place(name="any", refused="at most 30"), {**NAMED, "ended": None}, "no error that matches 'at most 30'"),
        (Place(name="any", refused="at most 30"), SERVED, "no error that matches 'at most 30'"),
    ],
)
def test_place_serves_or_ends_with_the_error_of_its_limit(place, figures, found):
    assert problem(place, figures) == found
