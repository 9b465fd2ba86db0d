"""Metrics that every service shares."""

from tandem_services.common.metrics import bounded_label, new_registry, render


def test_unknown_values_do_not_become_labels():
    assert bounded_label("/v1/models", {"/v1/models"}) == "/v1/models"
    assert bounded_label("/made/up", {"/v1/models"}) == "other"


def test_a_registry_tells_about_its_process():
    assert b"process_resident_memory_bytes" in render(new_registry())
