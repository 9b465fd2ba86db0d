"""The predicted latency of choices, by what the chosen workers report (`latency`)."""

from collections.abc import Sequence

from tandem_engine.config import Role
from tandem_services.common.recording import estimating
from tandem_services.router.cost import PRESENT, Demand
from tandem_services.router.decision import Latency, RouteQuery, ScoreTerm
from tandem_services.router.latency import first_token_terms, inter_token_s, reserved_sequences
from tandem_services.router.registry import WorkerRecord


@estimating(lambda *_, **__: None)
def predicted_latency(
    terms: Sequence[ScoreTerm],
    query: RouteQuery,
    demand: Demand,
    *,
    decode: WorkerRecord | None,
    prefill: WorkerRecord | None = None,
) -> Latency | None:
    """Of a choice with the price `terms`; None where nothing was scored, or a worker is not known.

    `prefill`: of a pair.
    """
    if decode is None or not terms:
        return None
    computing = decode if prefill is None else prefill
    absence = query.absences.get(computing.view.incarnation, PRESENT)
    return Latency(
        terms=first_token_terms(
            terms,
            computing.load,
            adapter_load_s=absence.load_s,
            decodes_too=computing.view.role is not Role.PREFILL,
        ),
        itl_s=inter_token_s(decode.load, demand, sequences=reserved_sequences(terms, decode.load)),
        kind=computing.kind,
        decode_kind=decode.kind,
    )
