"""The latency model of the router: predicted seconds to the first token and between tokens. Pure.

`cost` predicts prices: what a choice costs the request and all others together. A latency is what the request itself
waits, so it has some of the terms of the price, and others that are the same wherever a request goes:

    prefix_fetch     as in the price; likewise host_load, prefill_queue and prefill_compute
    adapter_load     seconds until the adapter is in the memory of the worker that computes the prompt, beyond its queue
    step_base        what a step takes whatever it computes: rates of prefill leave it out
    decode_step      on a worker that decodes as well: the step that its sequences are in

The stall of others, evictions, transfer, load and capacity of the decode worker are prices. First tokens leave the
worker that computes the prompt, so a transfer delays the second token and not the first.

The time between tokens is the duration of a step of the decode worker with one more sequence, as the worker itself has
fitted it (`StepFit`), or its recent mean where there is no fit.
"""

from collections.abc import Iterable

from tandem_services.router.cost import TURN_TOKENS, Demand, Load, prefill_queue_s
from tandem_services.router.decision import ScoreTerm

GATEWAY_WAIT = "gateway_wait"
"""In the gateway's queue: the gateway adds it."""

DECODE_STEP = "decode_step"

SHARED_TERMS = frozenset({"prefix_fetch", "host_load", "prefill_queue", "prefill_compute"})
"""Terms of a price that are latency."""

QUEUE_TERMS = frozenset({GATEWAY_WAIT, "prefix_fetch", "adapter_load", "prefill_queue"})
"""Of a latency, what passes before the first step that computes the prompt."""


def first_token_terms(
    price: Iterable[ScoreTerm], computing: Load, *, adapter_load_s: float = 0.0, decodes_too: bool
) -> tuple[ScoreTerm, ...]:
    """Seconds from the choice to the first token.

    `price`: the terms of the choice. `computing`: the load of the worker that computes the prompt. `adapter_load_s`:
    until that worker has the adapter of the request. `decodes_too`: it also generates tokens.
    """
    step_s = computing.step_s if decodes_too and computing.sequences > 0 else 0.0
    return (
        *[term for term in price if term.name in SHARED_TERMS],
        ScoreTerm("adapter_load", max(0.0, adapter_load_s - prefill_queue_s(computing)) if adapter_load_s else 0.0),
        ScoreTerm("step_base", computing.step_base_s),
        ScoreTerm(DECODE_STEP, step_s),
    )


def inter_token_s(decode: Load, demand: Demand, *, sequences: float) -> float:
    """Seconds between two tokens on a worker that decodes `sequences` already; 0 where it has measured no step.

    Prompts that wait there are computed in the same steps: spread over the tokens of this output.
    """
    fit = decode.step_fit
    if fit is None:
        return decode.step_s
    output_tokens = max(1, demand.output_tokens)
    return (
        fit.base_s
        + fit.sequence_s * (sequences + 1)
        + fit.kv_token_s * (decode.kv_tokens + demand.prompt_tokens + output_tokens / 2)
        + fit.chunk_token_s * min(TURN_TOKENS, decode.queue_tokens / output_tokens)
    )


def reserved_sequences(price: Iterable[ScoreTerm], decode: Load) -> float:
    """Sequences of the decode worker with those that were reserved since its report: its load was priced by them."""
    load_s = next((term.seconds for term in price if term.name == "decode_load"), None)
    if load_s is None or decode.step_s <= 0.0:
        return decode.sequences
    return load_s / decode.step_s
