"""What the engines of one attempt are sent: the same request, with the two ends of one handoff where there are two."""

import msgspec

from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, Peer, PrefixFetch
from tandem_services.gateway.choice_request import ChoiceRequest
from tandem_services.gateway.progress import Progress
from tandem_services.gateway.request_trace import AttemptTrace
from tandem_services.router.choice import Choice, PlannedFetch, WorkerView


def request_alone(
    request: ChoiceRequest, progress: Progress, trace: AttemptTrace, *, deadline_s: float
) -> GenerateRequest:
    """What whoever generates is asked; `deadline_s` from now."""
    return GenerateRequest(
        rid=request.attempt_id(progress),
        input_ids=request.input_ids,
        sampling=request.sampling.without_prompt_logprobs() if progress.scored else request.sampling,
        resume_ids=tuple(progress.received),
        cache_salt=request.cache_salt,
        priority=request.priority,
        group=request.group,
        pooling=request.pooling,
        session=None if request.turn is None else request.turn.ref,
        deadline_s=deadline_s,
        trace=trace.context,
    )


def with_fetch(alone: GenerateRequest, planned: PlannedFetch | None) -> GenerateRequest:
    """For whoever computes the prompt: with the prefix that it had better bring from another worker."""
    if planned is None:
        return alone
    fetch = PrefixFetch(peer=_address(planned.source), tokens=planned.tokens, within_s=planned.within_s)
    return msgspec.structs.replace(alone, fetch=fetch)


def with_handoff(
    request: GenerateRequest, side: HandoffSide, generation: int, *, peer: WorkerView, moving: bool = False
) -> GenerateRequest:
    """One end of a handoff whose other end is `peer`."""
    handoff = Handoff(side=side, room=request.rid, generation=generation, peer=_address(peer), moving=moving)
    # Who receives the KV of a session's first turn keeps the session.
    session = request.session if side is HandoffSide.RECEIVE else None
    return msgspec.structs.replace(request, handoff=handoff, session=session)


def pair_of_requests(
    alone: GenerateRequest, choice: Choice, generation: int, *, moving: bool
) -> tuple[GenerateRequest, GenerateRequest]:
    """For the decode worker and for the prefill worker of `choice`, which is a pair."""
    assert choice.prefill is not None, "a worker alone hands nothing over"
    receive = with_handoff(alone, HandoffSide.RECEIVE, generation, peer=choice.prefill)
    computing = with_fetch(alone, choice.fetch)
    return receive, with_handoff(computing, HandoffSide.SEND, generation, peer=choice.decode, moving=moving)


def _address(worker: WorkerView) -> Peer:
    """Where other engines reach it."""
    return Peer(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        endpoint=worker.peer_endpoint,
        compat_hash=worker.compat_hash,
    )
