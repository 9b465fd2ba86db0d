"""A resumed request as two turns of a session: what was to be resumed is generated, and its last token given back.

whole     prompt, resumed tokens r₀ … rₙ           ─▶ the rest of the reference
turn 0    prompt                                   ─▶ r₀ … rₙ₋₁
turn 1    rₙ                                       ─▶ the rest of the reference

Or a prompt in two turns, of which the first adds no output to the session:

turn 0    first half of the prompt                 ─▶ one token, which is dropped
turn 1    second half                              ─▶ the reference
"""

from collections.abc import Sequence

import msgspec

from tandem_engine.generation import Generation
from tandem_engine.messages.requests import GenerateRequest, SessionRef
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.verify.compare import Generate


def in_turns(generate: Generate) -> Generate:
    """As `generate`, with a session for each request that can be told in two turns.

    One whose first turn already goes wrong ends with that turn's output, which differs from any reference.
    """

    def converse(requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        told = [request for request in requests if _can_be_told(request)]
        first = generate([_first_turn(request) for request in told], stagger)
        wrong = {
            request.rid: output
            for request, output in zip(told, first, strict=True)
            if tuple(output.token_ids) != request.resume_ids[:-1]
        }
        second = [_second_turn(request) if _can_be_told(request) else request for request in requests]
        outputs = generate(second, stagger)
        return [wrong.get(request.rid, output) for request, output in zip(requests, outputs, strict=True)]

    return converse


def appended(generate: Generate) -> Generate:
    """As `generate`, with the first half of each prompt computed by a turn that keeps no output."""

    def feed(requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        generate([_first_half(request) for request in requests if len(request.input_ids) > 1], stagger)
        return generate([_second_half(request) for request in requests], stagger)

    return feed


def _first_half(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request,
        rid=f"{request.rid}, first half",
        input_ids=request.input_ids[: len(request.input_ids) // 2],
        session=SessionRef(id=request.rid, keeps_output=False),
        sampling=SamplingParams(max_tokens=1),
    )


def _second_half(request: GenerateRequest) -> GenerateRequest:
    if len(request.input_ids) < 2:
        return request
    rest = request.input_ids[len(request.input_ids) // 2 :]
    return msgspec.structs.replace(request, input_ids=rest, session=SessionRef(id=request.rid, turn=1))


def _can_be_told(request: GenerateRequest) -> bool:
    # A grammar or a budget knows the output of its own turn alone.
    return len(request.resume_ids) > 1 and not request.sampling.masked


def _first_turn(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request,
        rid=f"{request.rid}, first turn",
        resume_ids=(),
        session=SessionRef(id=request.rid),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=len(request.resume_ids) - 1),
    )


def _second_turn(request: GenerateRequest) -> GenerateRequest:
    left = request.sampling.max_tokens - len(request.resume_ids)
    return msgspec.structs.replace(
        request,
        input_ids=request.resume_ids[-1:],
        resume_ids=(),
        session=SessionRef(id=request.rid, turn=1),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=left),
    )
