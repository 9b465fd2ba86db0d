"""Rank 0 sends and receives; all ranks get the same messages in the same turn, and the same result of each send."""

from collections.abc import Sequence

from tandem_engine.disaggregation.ranks.peers import PeerInputs, RankedPeers
from tandem_engine.messages.transfer import DrainAck
from tandem_engine.parallel.inputs import FromPeer, LosePeer, Meet
from tandem_engine.scheduler.lockstep import apply
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import make_pair

ME, OTHER = make_peer("me"), make_peer("other")
ACK = DrainAck(room="room", generation=1, sender=OTHER)


def alike(values: Sequence[int]) -> Sequence[int]:
    return values


def test_message_to_rank_0_applies_when_returned_as_input():
    network = PeerNetwork()
    socket = network.join(ME)
    first = RankedPeers(me=ME, least=alike, socket=socket)
    further = RankedPeers(me=ME, least=alike, socket=None)
    network.join(OTHER).send(ME, ACK)
    socket.supersede("other@0")
    assert [*first.inputs()] == [FromPeer(message=ACK), LosePeer(incarnation="other@0")]
    assert [*first.receive()] == [*further.inputs()] == []
    for rank in (first, further):
        rank.on_peer_message(ACK)
        assert [*rank.receive()] == [ACK]
        assert [*rank.receive()] == []


def test_message_went_if_rank_0_could_send_it():
    network = PeerNetwork()
    socket, other = network.join(ME), network.join(OTHER)
    first = RankedPeers(me=ME, least=alike, socket=socket)
    assert first.send(OTHER, ACK)
    assert [*other.receive()] == [ACK]
    socket.unreachable.add(OTHER.incarnation)
    assert not first.send(OTHER, ACK)
    # Another rank has nothing to send with and learns from rank 0.
    assert not RankedPeers(me=ME, least=lambda _own: [0], socket=None).send(OTHER, ACK)
    first.fence(OTHER.incarnation)
    assert socket.fenced == {OTHER.incarnation}


def test_engine_that_is_alone_loses_and_meets_peers_by_input_too():
    pair = make_pair()
    pair.submit_decode()
    pair.turn()
    inputs = PeerInputs(stage=pair.decode.stage, peers=None)
    apply(pair.decode.engine.scheduler, Meet(peers=(pair.prefill.peer,)), peers=inputs)
    assert [link.peer for link in pair.decode.stage.links.reports()] == [pair.prefill.peer.incarnation]
    apply(pair.decode.engine.scheduler, LosePeer(incarnation=pair.prefill.peer.incarnation), peers=inputs)
    pair.decode.step()
    assert pair.decode.finish().retryable
    assert pair.decode.stage.links.reports() == ()


def test_engine_without_transfers_takes_no_notice_of_peers():
    pair = make_pair()
    apply(pair.decode.engine.scheduler, LosePeer(incarnation="nobody@1"))
