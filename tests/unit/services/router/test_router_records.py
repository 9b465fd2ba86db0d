from dataclasses import replace

import msgspec
import pytest

from tandem_engine.base.names import LinkTransport
from tandem_engine.config import Role
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.messages.stats import LinkReport, StepFit
from tandem_services.router.registry import (
    ROW,
    WorkerState,
    pack_row,
    read_record,
    readable_fields,
)
from tandem_testing.router_builders import make_load, make_record


def written(**changes: str) -> dict[str, str]:
    """A worker's hash as it is read back."""
    record = make_record("w1", Role.PREFILL, state=WorkerState.DRAINING, load=make_load(queue_tokens=12.5))
    fields = {name: str(value) for name, value in readable_fields(record).items()}
    return fields | {"incarnation": "w1@1", "number": "1"} | changes


def test_record_survives_the_hash():
    record = make_record("w1", Role.PREFILL, state=WorkerState.DRAINING, load=make_load(queue_tokens=12.5))
    assert read_record(written()) == record


def test_links_survive_the_hash():
    links = (
        LinkReport(peer="d1@7", bytes_per_s=1.5e9, latency_s=0.001, transport=LinkTransport.SHM, age_s=3.0),
        LinkReport(peer="d2@7", broken=True, condition="expected rdma, got tcp", problem="no answer"),
    )
    fields = {name: str(value) for name, value in readable_fields(make_record("w1", links=links)).items()}
    record = read_record(fields | {"incarnation": "w1@1"})
    assert record is not None
    assert record.links == links


def test_adapters_survive_the_hash():
    adapter = ServedAdapter(name="sql", digest="0a" * 16, rank=8, root="sql-v2")
    record = make_record("w1", adapters={"sql": adapter})
    fields = {name: str(value) for name, value in readable_fields(record).items()}
    read = read_record(fields | {"incarnation": "w1@1"})
    assert read is not None
    assert read.view.adapters == {"sql": adapter}
    assert "adapters" not in readable_fields(make_record("w1"))


@pytest.mark.parametrize("digest", ["0" * 32, "0A" * 16, "0a" * 15, "", "0a" * 17])
def test_worker_row_with_a_malformed_adapter_digest_is_ignored(digest):  # [redis-values-untrusted]
    adapters = msgspec.json.encode([{"name": "sql", "digest": digest, "rank": 8, "root": ""}]).decode()
    assert read_record(written(adapters=adapters)) is None


@pytest.mark.parametrize("endpoint", ["", "http://10.0.0.7:9101", "http://[fe80::1%25eth0]:9", "http://pod-a:9101"])
def test_health_port_survives_the_hash(endpoint):
    record = make_record("w1", health_endpoint=endpoint)
    read = read_record({name: str(value) for name, value in readable_fields(record).items()} | {"incarnation": "w1@1"})
    assert read is not None
    assert read.view.health_endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["https://h:1", "http://h", "http://h:1/x", "http://a@h:1", "h:1", "http://h:01"])
def test_row_with_another_health_port_is_no_worker(endpoint):  # [redis-values-untrusted]
    assert read_record(written(health_endpoint=endpoint)) is None


FIT = StepFit(base_s=0.004, sequence_s=1e-4, kv_token_s=1e-7, chunk_token_s=2e-5)


def test_step_times_survive_the_hash():
    load = make_load(step_base_s=0.003, kv_tokens=4096.0)
    load.step_fit = FIT
    fields = {name: str(value) for name, value in readable_fields(make_record("w1", load=load)).items()}
    record = read_record(fields | {"incarnation": "w1@1"})
    assert record is not None
    assert (record.load.step_base_s, record.load.kv_tokens, record.load.step_fit) == (0.003, 4096.0, FIT)


def test_worker_of_a_release_without_step_times_has_none():
    fields = written()
    for name in ("step_base_s", "kv_tokens"):
        del fields[name]
    assert "step_fit" not in fields
    record = read_record(fields)
    assert record is not None
    assert (record.load.step_base_s, record.load.kv_tokens, record.load.step_fit) == (0.0, 0.0, None)


def test_kind_of_a_worker_survives_the_hash():
    record = replace(make_record("w1", compat_hash="0123456789abcdef"), details={"device": "cpu", "tp_size": 2})
    fields = {name: str(value) for name, value in readable_fields(record).items()}
    read = read_record(fields | {"incarnation": "w1@1"})
    assert read is not None
    assert read.kind == record.kind == "0123456789ab/cpu/tp2"
    assert make_record("w1").kind == "same/?/tp?"


def test_worker_of_a_release_without_links_has_none():
    fields = written()
    del fields["links"]
    record = read_record(fields)
    assert record is not None
    assert record.links == ()


@pytest.mark.parametrize(
    "change",
    [
        {"role": "boss"},
        {"state": "fine"},
        {"page_size": "0"},
        {"page_size": "1e3"},
        {"context_length": "-1"},
        {"queue_tokens": "nan"},
        {"prefill_tokens_per_s": "inf"},
        {"prefill_tokens_per_s": "0"},
        {"room_tokens": "-5"},
        {"links": "{"},
        {"links": '[{"peer": "d@1", "bytes_per_s": -1}]'},
        {"links": "[" + ",".join(['{"peer": "d@1"}'] * 65) + "]"},
        {"decode_step_s": "x" * 1000},
        {"step_base_s": "nan"},
        {"step_base_s": "-1"},
        {"kv_tokens": "1e300"},
        {"step_fit": "{"},
        {"step_fit": "[1, 2, 3, 4]"},
        {"step_fit": '{"base_s": 0.1, "sequence_s": 0.1, "kv_token_s": 0.1}'},
        {"step_fit": '{"base_s": -0.1, "sequence_s": 0.1, "kv_token_s": 0.1, "chunk_token_s": 0.1}'},
        {"step_fit": '{"base_s": 0.1, "sequence_s": 1e9, "kv_token_s": 0.1, "chunk_token_s": 0.1}'},
        {"step_fit": '{"base_s": "1", "sequence_s": 0.1, "kv_token_s": 0.1, "chunk_token_s": 0.1}'},
        {"request_endpoint": ""},
        {"request_endpoint": "10.0.0.1:5600"},
        {"request_endpoint": "ipc:///tmp/x"},
        {"request_endpoint": "tcp://host"},
        {"request_endpoint": "tcp://host:0"},
        {"request_endpoint": "tcp://host:70000"},
        {"request_endpoint": "tcp://host:5600/x"},
        {"request_endpoint": "tcp://a;b:5600"},
        {"peer_endpoint": "tcp://*:5601"},
        {"peer_endpoint": "tcp://host:١٢"},
        {"peer_endpoint": "tcp://" + "h" * 10_000 + ":1"},
    ],
)
def test_hash_that_makes_no_sense_is_no_worker(change):  # [redis-values-untrusted]
    assert read_record(written(**change)) is None


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:5600", "tcp://pod-0.tandem:1", "tcp://[fe80::1%eth0]:65535"])
def test_addresses_and_names_are_endpoints(endpoint):
    record = read_record(written(request_endpoint=endpoint, peer_endpoint=endpoint))
    assert record is not None
    assert record.view.request_endpoint == endpoint


def test_hash_with_a_missing_field_is_no_worker():
    newer = {"links", "host_token_s", "release", "step_base_s", "kv_tokens"}  # older releases have none
    for name in readable_fields(make_record("w1")).keys() - newer:
        fields = written()
        del fields[name]
        assert read_record(fields) is None, name


def test_routing_row_has_the_size_that_the_script_expects():
    assert len(pack_row(make_record("w1"))) == ROW.size == 90


@pytest.mark.parametrize("release", ["", "-1", "1.0", "one", "9999999999"])
def test_row_with_a_malformed_release_is_no_worker(release):  # [redis-values-untrusted]
    assert read_record(written(release=release)) is None


def test_row_that_names_no_release_is_of_release_0():
    fields = written()
    del fields["release"]
    record = read_record(fields)
    assert record is not None
    assert record.view.release == 0


def test_release_survives_the_hash():
    record = read_record(written(release="7"))
    assert record is not None
    assert record.view.release == 7


@pytest.mark.parametrize("name", ["tokenizer", "encoding"])
def test_digest_of_the_tokenizer_survives_the_hash(name):
    digest = "0a" * 16
    fields = {field: str(value) for field, value in readable_fields(make_record("w1", **{name: digest})).items()}
    read = read_record(fields | {"incarnation": "w1@1"})
    assert read is not None
    assert getattr(read.view, name) == digest
    assert name not in readable_fields(make_record("w1"))


@pytest.mark.parametrize("digest", ["0A" * 16, "0a" * 15, "0a" * 17, "../etc", "0a" * 15 + "0\n"])
def test_row_with_a_malformed_tokenizer_is_no_worker(digest):  # [redis-values-untrusted]
    assert read_record(written(tokenizer=digest)) is None
    assert read_record(written(encoding=digest)) is None
