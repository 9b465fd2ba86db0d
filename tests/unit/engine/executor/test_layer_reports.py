"""Callbacks for each layer's KV, with and without rotated heads."""

from dataclasses import dataclass, field

import pytest
import torch

from tandem_engine.executor.runner import notifying
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.model.attention.backend import TurningPlan

QKV = tuple(torch.zeros(1, 1, 2) for _ in range(3))
TURN = HeadTurn(torch.ones(1, 2), torch.zeros(1, 2), None)


@dataclass
class Calls(TurningPlan):
    """Writes down what is asked of it."""

    calls: list[object] = field(default_factory=list)

    def __call__(self, layer, q, k, v):
        self.calls.append(("attend", layer))
        return q

    def turn_and_attend(self, layer, q, k, v, turn):
        self.calls.append(("turn", layer, turn))
        return q


def test_plan_that_turns_heads_reports_after_turning():
    plan = Calls()
    attend = notifying(plan, lambda layer: plan.calls.append(("wrote", layer)))
    assert isinstance(attend, TurningPlan)
    attend.turn_and_attend(0, *QKV, TURN)
    attend(1, *QKV)
    assert plan.calls == [("turn", 0, TURN), ("wrote", 0), ("attend", 1), ("wrote", 1)]


def test_plan_without_head_turn_is_not_called_for_one():
    plan = Calls()
    attend = notifying(plan.__call__, lambda layer: plan.calls.append(("wrote", layer)))
    assert not isinstance(attend, TurningPlan)
    attend(2, *QKV)
    assert plan.calls == [("attend", 2), ("wrote", 2)]


def test_failing_layer_is_not_reported():
    reported = []

    def attend(layer, q, k, v):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        notifying(attend, reported.append)(3, *QKV)
    assert reported == []
