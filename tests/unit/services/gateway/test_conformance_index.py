"""Every rule and every row about HTTP, Redis or custom resources has a test that names it, or a line here that says why
it has none.

A test names what it proves in a comment behind its `def`, its table or its docstring: `# A2.14`, `# E1 #4–6, C1`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
RULES = {("A2", number) for number in range(1, 23)}
ROWS = {
    *(("E1", number) for number in range(1, 21)),
    *(("E2", number) for number in range(21, 31)),
    *(("E3", number) for number in range(31, 60)),
    *(("E4", number) for number in range(60, 65)),
    *(("E5", number) for number in range(65, 70)),
    *(("E6", number) for number in range(70, 75)),
    *(("E7", number) for number in range(75, 85)),
}
OPEN: dict[tuple[str, int], str] = {}
"""What no test proves, and why."""
DIFFERS: dict[tuple[str, int], str] = {
    ("A2", 6): "`prompt_logprobs=-1` is always a 400",
    ("E2", 21): "the last one counts",
    ("E1", 19): "closes its side of a connection",
    ("E1", 20): "One more ends a connection on which nothing is answered",
}
"""Where what is tested is not what the row says to the letter, and the words that say what is done instead, in the list
of differences in docs/api.md."""
ADVISORIES = {
    "client-controlled KV references, upstream URLs": ["test_a_client_names_no_peer_and_no_upstream"],
    "BadHost": [
        "test_a_request_has_one_host_that_is_a_host",
        "test_a_host_header_opens_no_door",
        "test_a_path_is_taken_as_it_is_written",
    ],
    "unguarded siblings": [
        "test_every_path_needs_a_key_but_those_of_probes",
        "test_every_route_is_listed_with_its_class",
    ],
    "dangerous features on the API": ["test_every_route_is_listed_with_its_class"],
    "n unbounded": ["test_a_bad_field_is_named"],
    "grammar bombs": ["test_a_bomb_costs_its_limit_and_the_next_grammar_works"],
    "disk and memory filled by unique schemas": ["test_the_least_recently_used_grammar_goes_first"],
    "templates and their variables": [
        "test_a_hostile_or_broken_template_ends_in_a_clear_error",
        "test_a_bad_chat_field_is_named",
    ],
    "heads, bodies, slow clients": [
        "test_a_head_without_end_is_not_kept",
        "test_a_head_that_never_ends_is_given_up",
        "test_large_heads_are_refused",
        "test_a_body_over_the_limit_is_refused",
        "test_a_body_that_was_promised_and_never_sent_is_a_408",
        "test_one_byte_chunks_count_as_bytes",
        "test_a_client_that_reads_nothing_is_given_up",
    ],
    "SSRF by media, media and embeds from clients": ["test_media_are_refused_and_never_fetched"],
    "special tokens in text": [
        "test_control_literals_in_messages_are_text",
        "test_control_tokens_in_tools_are_plain_text",
    ],
    "comparison of keys": ["test_every_digest_is_compared_whatever_the_key"],
    "model output executed": ["test_the_work_is_linear_in_what_a_model_writes"],
    "caches across tenants": ["test_tenants_share_no_prefixes_unless_they_say_so"],
    "what errors tell": ["test_random_bodies_get_an_answer_or_a_clear_refusal"],
    "methods": ["test_other_methods_are_refused_and_the_right_one_is_named"],
    "labels of metrics": ["test_made_up_names_do_not_become_time_series"],
    "logs": ["test_hostile_text_stays_on_one_printable_line"],
}
"""C1's rows about HTTP, and the tests of each."""

_MENTION = re.compile(r"\b(A2|E[1-7])((?:[\s,.#]+\d+(?:\s*[–-]\s*\d+)?)+)")
_NUMBERS = re.compile(r"(\d+)(?:\s*[–-]\s*(\d+))?")


def mentions(text: str) -> set[tuple[str, int]]:
    """Rules and rows named in the comments and docstrings of a test file."""
    found = set()
    for part, numbers in _MENTION.findall(text):
        for first, last in _NUMBERS.findall(numbers):
            found |= {(part, number) for number in range(int(first), int(last or first) + 1)}
    return found


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [path.read_text() for path in ROOT.glob("tests/**/test_*.py") if path != Path(__file__)]


@pytest.fixture(scope="module")
def named(sources) -> set[tuple[str, int]]:
    return set().union(*map(mentions, sources))


@pytest.mark.parametrize("wanted", sorted(RULES | ROWS), ids=lambda wanted: f"{wanted[0]}.{wanted[1]}")
def test_each_has_a_test_or_a_reason(named, wanted):
    assert (wanted in named) != (wanted in OPEN)


def test_what_differs_is_tested_and_told_as_it_is(named):
    assert set(DIFFERS) <= named
    told = (ROOT / "docs" / "api.md").read_text().partition("## Where we differ from OpenAI")[2]
    for words in DIFFERS.values():
        assert words in told


@pytest.mark.parametrize("advisory", ADVISORIES)
def test_each_advisory_has_its_tests(sources, advisory):
    for name in ADVISORIES[advisory]:
        assert any(f"def {name}(" in source for source in sources), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A2.14, A2.15: lengths", {("A2", 14), ("A2", 15)}),
        ("# E1 #4–6, E2 #22", {("E1", 4), ("E1", 5), ("E1", 6), ("E2", 22)}),
        ("# E2 #29, #30", {("E2", 29), ("E2", 30)}),
        ("# E4 62", {("E4", 62)}),
        ("GEMMA2 = 3", set()),
    ],
)
def test_numbers_are_found_as_they_are_written(text, expected):
    assert mentions(text) == expected
