"""Which worker may compute a prompt alone. Prices are held to brute force by tests/property/test_router_index.py."""

from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.cost import Candidate, Demand, Load
from tandem_services.router.decision import WorkerView
from tandem_services.router.scoring import options


def candidate(name: str, role: Role, *, matched: int = 0, compat: str = "c") -> Candidate:
    view = WorkerView(
        worker_id=name,
        incarnation=f"{name}@1",
        role=role,
        request_endpoint="tcp://127.0.0.1:1",
        peer_endpoint="tcp://127.0.0.1:2",
        compat_hash=compat,
        context_length=4096,
        page_size=16,
        model="m",
    )
    return Candidate(view=view, load=Load(room_tokens=1e6, max_sequences=8), matched=matched)


def alone(*candidates: Candidate, prompt: int) -> list[str]:
    demand = Demand(prompt_tokens=prompt, output_tokens=16, local_prefill_tokens=64)
    return [o.decode.view.worker_id for o in options(candidates, demand, Random(0)) if o.prefill is None]


PREFILL = candidate("p", Role.PREFILL)


@pytest.mark.parametrize(
    ("matched", "prompt", "may"),
    [(0, 64, True), (0, 65, False), (16, 80, True), (16, 81, False), (512, 576, True)],
    ids=["short prompt", "nothing cached", "64 missing", "65 missing", "long conversation, short turn"],
)
def test_decode_worker_computes_short_rest_of_cached_prompt(matched, prompt, may) -> None:
    assert alone(PREFILL, candidate("d", Role.DECODE, matched=matched), prompt=prompt) == (["d"] if may else [])


def test_decode_worker_without_compatible_prefill_serves_alone() -> None:
    foreign = candidate("p", Role.PREFILL, compat="other")
    assert alone(foreign, candidate("d", Role.DECODE), prompt=1000) == ["d"]


@pytest.mark.parametrize("prompt", [10, 1000])
def test_incompatible_decode_worker_is_unused_if_others_pair(prompt) -> None:  # [same-kind-paired]
    odd = candidate("odd", Role.DECODE, compat="other", matched=5)
    assert "odd" not in alone(PREFILL, candidate("d", Role.DECODE), odd, prompt=prompt)


def test_worker_for_both_may_always_serve_alone() -> None:
    assert alone(PREFILL, candidate("b", Role.BOTH), prompt=1000) == ["b"]
