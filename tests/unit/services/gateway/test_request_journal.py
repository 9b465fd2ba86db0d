import tracemalloc

import pytest

from tandem_engine.messages.outputs import FetchReport, TransferReport
from tandem_services.gateway.observe.explain import (
    ENTRY_BYTES,
    AttemptRecord,
    ChoiceRecord,
    FoundTokens,
    PredictedFetch,
    RequestJournal,
    RequestRecord,
)
from tandem_services.router.decision import PricedOption, PricedOptions, ScoreTerm


def terms() -> tuple[ScoreTerm, ...]:
    return tuple(ScoreTerm(name=f"term_{number}", seconds=number / 7) for number in range(7))


def attempt(number: int) -> AttemptRecord:
    options = tuple(
        PricedOption(
            decode=f"decode-{number}-{each}@1",
            prefill=f"prefill-{each}@1",
            predicted_s=0.5,
            terms=terms(),
            matched_tokens=each,
            decode_matched_tokens=2,
            fetch=None,
        )
        for each in range(4)
    )
    return AttemptRecord(
        decode=f"decode-{number}@1",
        prefill=f"prefill-{number}@1",
        source="redis",
        placement="pair",
        terms=terms(),
        candidates=PricedOptions(options=options, more=3),
        matched_tokens=17,
        fetch=PredictedFetch(source="other@1", tokens=5, seconds=0.25),
        resumed_tokens=0,
    )


def record(number: int, *, choices: int = 1, client: str | None = None, tenant: str = "ann") -> RequestRecord:
    return RequestRecord(
        request_id=f"id{number}",
        client_request_id=client,
        tenant=tenant,
        endpoint="/v1/completions",
        model="m",
        requested_model="m",
        stream=False,
        prompt_tokens=3,
        n=choices,
        created=1,
        status=200,
        e2e_s=0.5,
        choices=[ChoiceRecord(index=each, attempts=[attempt(number)], output_tokens=4) for each in range(choices)],
    )


def ended(journal: RequestJournal, number: int, **fields) -> None:
    journal.open(record(number, **fields))
    # What the journal holds is closed, not an equal record.
    journal.close(journal.find(f"id{number}", tenant=fields.get("tenant", "ann")))


@pytest.fixture
def journal():
    return RequestJournal(1000, max_bytes=20_000)


def test_journal_of_closed_records_is_bounded_in_bytes(journal):
    for number in range(200):
        ended(journal, number, choices=1 + number % 5, client=f"mine{number}")
    assert 0 < journal.bytes <= 20_000
    kept = journal.latest(1000)
    assert [each.request_id for each in kept] == [f"id{199 - back}" for back in range(len(kept))]
    assert journal.find("mine0", tenant="ann") is None
    assert journal.find("mine199", tenant="ann") == record(199, choices=5, client="mine199")


def test_journal_memory_follows_its_count_of_bytes():
    tracemalloc.start()
    try:
        journal = RequestJournal(100_000, max_bytes=500_000)
        for number in range(2000):
            ended(journal, number, client=f"mine{number}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * 500_000


def test_journal_record_larger_than_all_is_dropped(journal):
    ended(journal, 1, choices=128)
    assert (journal.bytes, journal.latest(9)) == (0, [])


def test_journal_open_record_is_never_dropped_for_bytes(journal):
    journal.open(record(0, client="running"))
    for number in range(1, 100):
        ended(journal, number)
    assert journal.find("running", tenant="ann") is not None


def test_journal_closed_record_equals_the_open_one(journal):
    whole = record(7, choices=2)
    whole.choices[0].transfer = TransferReport(pages=3, bytes=9, pages_reused=1, wait_s=0.1, exposed_s=0.5)
    whole.choices[0].fetch = FetchReport(peer="other@1", pages=2, bytes=4, wait_s=0.1)
    whole.choices[0].cache_hits = FoundTokens(device=1, host=2, disk=3, fetched=4)
    journal.open(whole)
    journal.close(whole)
    found = journal.find("chatcmpl-id7", tenant="ann")
    assert found == whole
    assert found is not whole
    assert journal.running == 0


def test_journal_alias_of_a_newer_request_outlives_an_older(journal):
    ended(journal, 1, client="same")
    journal.open(record(2, client="same"))
    for number in range(3, 60):
        ended(journal, number)
    assert journal.find("id1", tenant="ann") is None
    assert journal.find("same", tenant="ann").request_id == "id2"


def test_journal_tenants_see_their_own_records_alone(journal):
    ended(journal, 1, client="same", tenant="ann")
    assert journal.find("id1", tenant="bob") is None
    assert journal.find("same", tenant="bob") is None
    assert journal.find_of_any_caller("same").tenant == "ann"
    assert journal.find_of_any_caller("none") is None


def test_journal_counts_each_entry_with_its_ids(journal):
    ended(journal, 1)
    assert journal.bytes > ENTRY_BYTES
