"""The account of a finished handoff: what the writer says that it sent, and what the receiver makes of it.

writer      every push is out ─▶ `record_of` ─▶ `HandoffRecord`
receiver    `HandoffRecord` ─▶ `problem_with`: a peer is trusted as little as a client ─▶ digests ─▶ its request goes on
"""

from tandem_engine.disaggregation.grants import Grant
from tandem_engine.disaggregation.send_room import SendRoom
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import HandoffRecord
from tandem_engine.scheduler.request import Request


def record_of(room: SendRoom, grant: Grant, *, sender: Peer, ranks: int, exposed_s: float) -> HandoffRecord:
    """What `sender` has written into the pages of `grant`, on so many ranks."""
    req = room.req
    resumed_len = room.total - req.prompt_len
    return HandoffRecord(
        room=room.key.room,
        generation=room.key.generation,
        sender=sender,
        first_token=grant.first_token,
        pages=len(grant.pages),
        digests=room.all_digests(),
        output_ids=tuple(req.output_ids[resumed_len:]),
        logprobs=tuple(req.logprobs) if req.sampling.logprobs is not None else None,
        cached_tokens=req.cached_tokens,
        cache_hits=req.cache_hits,
        exposed_s=exposed_s,
        ranks=ranks,
    )


def problem_with(record: HandoffRecord, req: Request, *, granted: int, first_token: int, vocab_size: int) -> str | None:
    """Why `req`, for which `granted` pages from `first_token` on were granted, cannot go on from `record`."""
    if record.first_token != first_token or record.pages != granted:
        return (
            f"the writer reports {record.pages} pages from token {record.first_token}; "
            f"{granted} from token {first_token} were granted"
        )
    if len(record.digests) != granted:
        return f"{len(record.digests)} digests for {granted} pages"
    if len(record.output_ids) != 1:
        return f"{len(record.output_ids)} tokens handed over instead of one"
    if not 0 <= record.output_ids[0] < vocab_size:
        return f"token id {record.output_ids[0]} handed over, the vocabulary ends at {vocab_size - 1}"
    wanted = 0 if req.sampling.logprobs is None else 1
    if len(record.logprobs or ()) != wanted:
        return f"{len(record.logprobs or ())} logprobs handed over instead of {wanted}"
    return None
