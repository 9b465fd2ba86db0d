"""`benchmarks/adapters.py`: its ratios, and what it refuses to measure."""

import json

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

with benchmarks_importable():
    import adapters


def test_ratio_is_the_median_of_the_rounds_and_has_a_target(capsys):
    rounds = [rounds_of(bare=1.0, unused=1.0, mixed=mixed) for mixed in (1.25, 1.0, 2.0)]
    facts = {"rank": 16, "streams": 8, "sizes": (100, 25), "stored": "float32"}
    assert adapters.report(rounds, **facts) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["case"], row["ratio"], row["target"]) for row in rows] == [("unused", 1.0, 0.99), ("mixed", 0.8, 0.85)]
    assert [row["cpu_ratio"] for row in rows] == [1.0, 0.8]
    assert adapters.report([rounds_of(bare=1.0, unused=1.005, mixed=1.1)], **facts) == 0


def rounds_of(**seconds):
    """One round; its process has two busy threads."""
    return {case: adapters.Seconds(wall, 2 * wall) for case, wall in seconds.items()}


class Engine:
    """One whose answers are planned."""

    served_adapters = ()


@pytest.mark.parametrize(
    ("unused", "mixed", "message"),
    [((1,), (2,), None), ((3,), (2,), "change outputs of the model"), ((1,), (1,), "changes no output")],
)
def test_outputs_are_compared_before_anything_is_measured(monkeypatch, unused, mixed, message):
    bare, full = Engine(), Engine()

    def run(engine, sent):
        """Requests of adapters are as many as the engine has: none."""
        return 1.0, [(1,) if engine is bare else unused if sent else mixed]

    monkeypatch.setattr(adapters, "run", run)
    if message is None:
        assert len(adapters.measure(bare, full, 3, streams=8)) == 3
        return
    with pytest.raises(SystemExit, match=message):
        adapters.measure(bare, full, 3, streams=8)
