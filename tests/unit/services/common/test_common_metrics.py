"""Metrics that every service shares."""

import asyncio

from prometheus_client import CollectorRegistry, Counter, generate_latest

from tandem_services.common.metrics import bounded_label, new_registry, render


def test_unknown_values_do_not_become_labels():
    assert bounded_label("/v1/models", {"/v1/models"}) == "/v1/models"
    assert bounded_label("/made/up", {"/v1/models"}) == "other"


async def test_registry_has_metrics_of_its_process():
    assert b"process_resident_memory_bytes" in await render(new_registry())


async def test_others_have_their_turn_between_families():
    """A large exposition held up every stream for as long as it took."""
    registry = CollectorRegistry()
    for number in range(5):
        Counter(f"events_{number}", "Of some kind", ["kind"], registry=registry).labels(kind="a").inc(number)
    rendering = asyncio.create_task(render(registry))
    turns = 0
    while not rendering.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 5
    assert rendering.result() == generate_latest(registry)
