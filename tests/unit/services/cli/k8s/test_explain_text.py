"""What `kubectl tandem explain` writes of a record."""

import pytest

from tandem_services.cli.text.explanation import explain_text


def record(**choice):
    known = {"index": 0, "attempts": [], "output_tokens": 5, "cached_tokens": 64, "cache_hits": None, "transfer": None}
    times = dict.fromkeys(("admission_s", "queue_s", "prefill_s", "ttft_s"))
    return {
        "request_id": "r",
        "model": "mock",
        "endpoint": "/v1/completions",
        "status": 200,
        "prompt_tokens": 96,
        "e2e_s": None,
        "error": None,
        "choices": [{**known, **times, **choice}],
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            {"cache_hits": {"device": 8, "host": 16, "disk": 8, "fetched": 32}},
            "64 of the prompt cached (16 in host memory, 8 in files, 32 fetched);",
        ),
        ({"cache_hits": {"device": 64, "host": 0, "disk": 0, "fetched": 0}}, "64 of the prompt cached;"),
        ({"cache_hits": None}, "64 of the prompt cached;"),
        ({"cached_tokens": None}, "0 of the prompt cached;"),
        ({"unusable_tokens": 0, "cache_hits": None}, "64 of the prompt cached;"),
        (
            {"unusable_tokens": 32, "cache_hits": None},
            "64 of the prompt cached, 32 more computed again: nothing was kept to continue from there;",
        ),
        (
            {"queue_s": 0.5, "delay_s": 0.25},
            "in the worker's queue 500 ms, of it for the scheduling delay 250 ms",
        ),
    ],
)
def test_explained_choice_names_tier_of_cached_tokens(choice, expected):
    assert expected in explain_text(record(**choice))


def test_explanation_of_older_gateway_lacks_field():
    older = record()
    del older["choices"][0]["cache_hits"]
    assert "64 of the prompt cached;" in explain_text(older)
