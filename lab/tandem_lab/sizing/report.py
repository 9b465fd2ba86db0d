"""What `tandem size` says beside the manifest."""

from collections.abc import Sequence

from tandem_lab.sizing.load import Objectives
from tandem_lab.sizing.search import Fleet, Score

HEADER = ("GPUS", "PRICE/H", "WORKERS", "TP", "CHUNK", "RUNNING", "ATTAINMENT", "TTFT", "ITL", "RETRACTIONS")


def table(fleets: Sequence[Fleet], *, price: float) -> str:
    """One line for each fleet; times at the percentile asked for."""
    rows = [HEADER, *(_row(fleet, price) for fleet in fleets)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(fleet: Fleet, price: float) -> tuple[str, ...]:
    return (
        str(fleet.gpus),
        f"{fleet.gpus * price:.2f}",
        f"{fleet.prefill}P + {fleet.decode}D",
        str(fleet.cell.rates.gpus),
        str(fleet.cell.chunk_tokens),
        str(fleet.cell.running),
        f"{fleet.score.attainment:.4f}",
        f"{fleet.score.ttft_s:.2f} s",
        f"{fleet.score.itl_s * 1e3:.1f} ms",
        str(fleet.score.retractions),
    )


def summary(fleet: Fleet, wanted: Objectives, proof: Score, *, price: float, trace: str, rate: float) -> str:
    """For the terminal, and as comments of the manifest. `rate`: of the load sized for, over that of the half."""
    rates = fleet.cell.rates
    source = "measured rates" if rates.measured else "an ESTIMATE from model and device: measure a worker to be sure"
    return "\n".join(
        (
            f"tandem size: {fleet.prefill} prefill and {fleet.decode} decode workers of {rates.gpus} GPUs, "
            f"{fleet.gpus * price:.2f} per hour, by {source}",
            f"asked: TTFT {wanted.ttft_s:g} s and ITL {wanted.itl_s * 1e3:g} ms for {wanted.percentile:.1%}",
            f"first half of {trace}, at {rate:.2f} times its rate: {fleet.score.attainment:.2%} met both; second half, "
            f"not used for sizing: {proof.attainment:.2%}",
        )
    )
