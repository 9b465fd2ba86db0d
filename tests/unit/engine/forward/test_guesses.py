"""Drafts on a device: their places in the step that verifies them, and which step reads them."""

import torch

from tandem_engine.forward.batch import ForwardResult, GuessedIds, Guesses
from tandem_engine.scheduler.speculation import StepDrafts


class Proposal:
    """Two steps: the first guesses for three sequences, the second continues the first and the last of them."""

    def __init__(self) -> None:
        self.reads = 0
        self.guesses = Guesses(self._read, on_device=torch.tensor([10, 20, 30, 11, 31]))
        self.chains = ((0, 3), (1,), (), (2, 4))

    def _read(self) -> list[ForwardResult]:
        self.reads += 1
        return [
            ForwardResult(step=0, next_token_ids=(10, 20, 30), compute_s=0.5),
            ForwardResult(step=0, next_token_ids=(11, 31), compute_s=0.25),
        ]


def test_draft_ids_are_filled_on_device_without_host_read():
    proposal = Proposal()
    ids = GuessedIds.of(proposal.guesses, proposal.chains, first=2)
    input_ids = torch.tensor([7, 7, 1, 0, 0, 2, 0, 3, 4, 0, 0])
    ids.fill(input_ids)
    assert input_ids.tolist() == [7, 7, 1, 10, 11, 2, 20, 3, 4, 30, 31]
    assert proposal.reads == 0
    assert dict(ids.known()) == {3: 10, 4: 11, 6: 20, 9: 30, 10: 31}


def test_draft_chain_cut_for_lack_of_pages_keeps_other_chains():
    proposal = Proposal()
    ids = GuessedIds.of(proposal.guesses, ((0,), (1,), (), (2, 4)), first=0)
    input_ids = torch.zeros(8, dtype=torch.int64)
    ids.fill(input_ids)
    assert input_ids.tolist() == [0, 10, 0, 20, 0, 0, 30, 31]


def test_device_drafts_are_read_once_on_demand():
    proposal = Proposal()
    drafts = StepDrafts(chains=proposal.chains, guesses=proposal.guesses, propose_s=1.0)
    assert proposal.reads == 0
    known = drafts.known()
    assert known == StepDrafts(chains=((10, 11), (20,), (), (30, 31)), propose_s=1.0)
    assert known.known() is known
    assert drafts.queued_s() == 0.75
    assert known.queued_s() == 0.0
    assert proposal.reads == 1
