"""Tensors are copied to a device and back without a wait; simulated streams detect one."""

import pytest
import torch

from tandem_engine.executor.cuda.runner import tensors_of, with_tensors
from tandem_engine.executor.cuda.streams import ALIGNMENT, StreamName, download, upload
from tandem_testing.forward_builders import Seq, make_batch
from tandem_testing.simulated_device import HostWaitError, MixedDevicesError, SimulatedStreams, UnorderedError

FORWARD, COPY = StreamName.FORWARD, StreamName.COPY


def on_device(streams: SimulatedStreams, *values: float) -> torch.Tensor:
    return upload(streams, [torch.tensor(values)])[0]


def test_tensors_arrive_as_they_were_each_at_an_even_address():
    streams = SimulatedStreams()
    given = [
        torch.arange(5),
        torch.ones(3, 2, dtype=torch.int32).T,
        torch.empty(0, 4),
        torch.tensor([True]),
        torch.tensor(2.5),
    ]
    arrived = upload(streams, given)
    for mine, theirs in zip(arrived, given, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype is theirs.dtype
        assert mine.storage_offset() * mine.itemsize % ALIGNMENT == 0
    assert upload(streams, []) == []


def test_stream_results_are_invalid_before_their_event():
    streams = SimulatedStreams(looks=3)
    values = on_device(streams, 1.0, 2.0)
    with streams.on(FORWARD):
        doubled = values * 2
    results = download(streams, [doubled, values])
    assert [results.arrived() for _ in range(3)] == [False] * 3
    assert results.tensors[0].tolist() != [2.0, 4.0]
    assert results.arrived()
    assert [tensor.tolist() for tensor in results.tensors] == [[2.0, 4.0], [1.0, 2.0]]


def test_batch_is_taken_apart_and_put_together():
    batch = make_batch([Seq(seq_len=3, extend_len=3, pages=[1], row=2, input_ids=[4, 5, 6])])
    tensors = tensors_of(batch)
    assert len(tensors) == 8 + 6
    other = with_tensors(batch, [tensor + 1 for tensor in tensors])
    assert other.input_ids.tolist() == [5, 6, 7]
    assert other.mode is batch.mode
    with pytest.raises(AssertionError, match="more tensors"):
        with_tensors(batch, [*tensors, tensors[0]])


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x[x > 1.0],
        lambda x: x.repeat_interleave((x > 1.0).long()),
        lambda x: torch.tensor([1.0, 2.0], device=x.device) + x,
        lambda x: x.copy_(torch.zeros(2)),
    ],
)
def test_host_sync_on_simulated_streams_raises(look):  # [no-device-wait]
    streams = SimulatedStreams()
    values = on_device(streams, 1.0, 2.0)
    with pytest.raises(HostWaitError), streams.on(FORWARD):
        look(values)


@pytest.mark.parametrize(
    "mix", [lambda x: x + torch.ones(2), lambda x: x[torch.tensor([1])], lambda x: x + torch.arange(2)]
)
def test_device_and_host_do_not_mix_on_simulated_streams(mix):
    streams = SimulatedStreams()
    values = on_device(streams, 1.0, 2.0)
    with pytest.raises(MixedDevicesError), streams.on(FORWARD):
        mix(values)


def test_simulated_streams_that_share_memory_need_an_event():
    streams = SimulatedStreams()
    values = on_device(streams, 1.0, 2.0)
    with streams.on(FORWARD):
        doubled = values * 2
    with pytest.raises(UnorderedError), streams.on(COPY):
        doubled + 1
    streams.wait(COPY, streams.record(FORWARD))
    with streams.on(COPY):
        doubled + 1
    with pytest.raises(UnorderedError), streams.on(FORWARD):
        doubled.zero_()
    streams.wait(FORWARD, streams.record(COPY))
    with streams.on(FORWARD):
        doubled.zero_()


def test_completed_work_needs_no_further_event():
    streams = SimulatedStreams(looks=0)
    values = on_device(streams, 1.0)
    with streams.on(FORWARD):
        doubled = values * 2
    assert streams.record(FORWARD).query()
    with streams.on(COPY):
        assert doubled.clone() is not doubled
